// C (M x N) = or += A (M x K) * B (K x N), where an element of A and B is a word: one float, or two bfloat16 that
// follow one another along K. A has any strides, C has rows, and B is cut into panels of columns; N is a multiple of
// LANES.
//
// With tiles (tiles.h), a product of bfloat16 asks for more: N is a multiple of Padding::columns and K one of
// Padding::words, ak is 1, and A and C have rows up to a multiple of Padding::rows, whatever is in A's.
namespace {

// What a product multiplies with, cut into panels of Padding::panel columns.
struct Operand {
    const float* at;
    int64_t row, panel;  // words from one row to the next, and from one panel to the next
};

template <bool BF> struct Padding {
    static constexpr bool tiles = BF && TILES;
    static constexpr int64_t rows = tiles ? 32 : 1, columns = tiles ? 32 : LANES, words = tiles ? 16 : 1;
    static constexpr int64_t panel = tiles ? 32 : 2 * LANES;
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// (Not inlined: among other code its accumulators would not all stay in registers.)
template <bool BF, int MR, int NV>
__attribute__((noinline)) void tile(int64_t K, const float* A, int64_t am, int64_t ak, const float* B, int64_t bk, float* C, int64_t cm,
                 bool add) {
    vf acc[MR][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[m][v] = add ? load<vf>(C + m * cm + v * LANES) : vf{};
    for (int64_t k = 0; k < K; k++) {
        vf b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) b[v] = load<vf>(B + k * bk + v * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            uint32_t word;
            std::memcpy(&word, A + m * am + k * ak, 4);
            vf a = (vf)splat(word);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[m][v] = fma<BF>(acc[m][v], a, b[v]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store(C + m * cm + v * LANES, acc[m][v]);
}

// As many accumulators as the registers hold beside the operands: enough to hide the latency of the multiply-add. The
// emulated product of bfloat16 needs registers itself.
template <bool BF> constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 && !BF ? 6 : 4;

template <bool BF, int NV, class Between>
inline void panel(int64_t M, int64_t K, const float* A, int64_t am, int64_t ak, const float* B, int64_t bk, float* C,
                  int64_t cm, bool add, Between& between) {
    constexpr int most = ROWS<BF>;
    int64_t m = 0;
    for (; m + most <= M && !(most == 6 && M - m == 8); m += most) {  // (8 rows as 4 and 4, not as 6, 1 and 1)
        tile<BF, most, NV>(K, A + m * am, am, ak, B, bk, C + m * cm, cm, add);
        between();
    }
    if constexpr (most > 8)
        for (; m + 8 <= M; m += 8) tile<BF, 8, NV>(K, A + m * am, am, ak, B, bk, C + m * cm, cm, add);
    if constexpr (most > 4)
        for (; m + 4 <= M; m += 4) tile<BF, 4, NV>(K, A + m * am, am, ak, B, bk, C + m * cm, cm, add);
    for (; m < M; m++) tile<BF, 1, NV>(K, A + m * am, am, ak, B, bk, C + m * cm, cm, add);
}

struct Nothing {
    void operator()() const {}
};

// About how often a product calls between().
template <bool BF> int64_t pauses(int64_t M, int64_t N, int64_t K) {
    if (Padding<BF>::tiles) return (M + 31) / 32 * (N / 32) * (K / 16);
    return (M + ROWS<BF> - 1) / ROWS<BF> * ((N + 2 * LANES - 1) / (2 * LANES));
}

// Panel by panel of B, so that one panel stays in the first cache while all rows of A pass by. between() is called
// now and then, evenly.
template <bool BF, class Between = Nothing>
void gemm(int64_t M, int64_t N, int64_t K, const float* A, int64_t am, int64_t ak, Operand B, float* C, int64_t cm,
          bool add, Between between = {}) {
#if TILES
    if constexpr (BF)
        return gemm_of_tiles(round_up(M, Padding<BF>::rows), N, K, A, am, B.at, B.row, B.panel, C, cm, add, between);
#endif
    for (int64_t n = 0; n < N; n += 2 * LANES, B.at += B.panel) {
        if (n + LANES < N) panel<BF, 2>(M, K, A, am, ak, B.at, B.row, C + n, cm, add, between);
        else panel<BF, 1>(M, K, A, am, ak, B.at, B.row, C + n, cm, add, between);
    }
}

}  // namespace
