// Intel's AMX: eight tiles of 16 rows of 64 bytes, and an instruction that multiplies two tiles of bfloat16 pairs. The
// code that works on them uses the compiler's intrinsics; -DEMULATE_TILES puts functions of the same names and meaning
// in their place, so that it is tested on processors without AMX.
#if defined(EMULATE_TILES) || defined(__AMX_TILE__)
#define TILES 1
#else
#define TILES 0
#endif

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if TILES
#include <stdexcept>

namespace {

// (Intel 64 Software Developer's Manual, LDTILECFG. GCC's intrinsic does not tell the compiler that all 64 bytes are
// read: a constant is always there.)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig TILE_CONFIG;

#if defined(EMULATE_TILES)
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
struct EmulatedTiles {
    bool configured = false;
    uint32_t word[8][16][16];
};
thread_local EmulatedTiles emulated;

inline uint32_t (*emulated_tile(int number))[16] {
    if (!emulated.configured) throw std::logic_error("a tile is used by a thread that has not configured them");
    return emulated.word[number];
}
inline void _tile_loadconfig(const void* config) {
    if (std::memcmp(config, &TILE_CONFIG, sizeof TILE_CONFIG)) throw std::logic_error("these tiles are not emulated");
    emulated.configured = true;
    std::memset(emulated.word, 0, sizeof emulated.word);
}
inline void _tile_release() { emulated.configured = false; }
inline void _tile_zero(int number) { std::memset(emulated_tile(number), 0, 16 * 64); }
inline void _tile_loadd(int number, const void* from, int64_t stride_bytes) {
    for (int r = 0; r < 16; r++) std::memcpy(emulated_tile(number)[r], (const char*)from + r * stride_bytes, 64);
}
inline void _tile_stored(int number, void* to, int64_t stride_bytes) {
    for (int r = 0; r < 16; r++) std::memcpy((char*)to + r * stride_bytes, emulated_tile(number)[r], 64);
}
// (TDPBF16PS: the lower and the upper halves of the words are summed apart. Subnormal numbers, which it takes for 0, are
// kept here.)
inline void _tile_dpbf16ps(int sum, int a, int b) {
    const auto *A = emulated_tile(a), *B = emulated_tile(b);
    auto number = [](uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; };
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float low = 0, high = 0;
            for (int k = 0; k < 16; k++) {
                low += number(A[m][k] << 16) * number(B[k][n] << 16);
                high += number(A[m][k] & 0xFFFF0000u) * number(B[k][n] & 0xFFFF0000u);
            }
            float total = number(emulated_tile(sum)[m][n]) + (low + high);
            std::memcpy(&emulated_tile(sum)[m][n], &total, 4);
        }
}
#endif

// While it lives, this thread may use the tiles.
struct Tiles {
    Tiles() { _tile_loadconfig(&TILE_CONFIG); }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
};

// gemm (gemm.h) of words of two bfloat16, for M and N that are multiples of 32 and K that is one of 16; an element of A
// follows another along K, and B is cut into panels of 32 columns. Four tiles of C at a time: each tile of A and of B is used twice.
template <class Between>
void gemm_of_tiles(int64_t M, int64_t N, int64_t K, const float* A, int64_t am, const float* B, int64_t bk, int64_t panel,
                   float* C, int64_t cm, bool add, Between& between) {
    asm volatile("" ::: "memory");  // (GCC's intrinsic does not say that it reads what was just written)
    for (int64_t n = 0; n < N; n += 32, B += panel)
        for (int64_t m = 0; m < M; m += 32) {
            float *upper = C + m * cm + n, *lower = upper + 16 * cm;
            if (add) {
                _tile_loadd(0, upper, cm * 4);
                _tile_loadd(1, upper + 16, cm * 4);
                _tile_loadd(2, lower, cm * 4);
                _tile_loadd(3, lower + 16, cm * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < K; k += 16) {
                _tile_loadd(4, A + m * am + k, am * 4);
                _tile_loadd(5, A + (m + 16) * am + k, am * 4);
                _tile_loadd(6, B + k * bk, bk * 4);
                _tile_loadd(7, B + k * bk + 16, bk * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                between();
            }
            _tile_stored(0, upper, cm * 4);
            _tile_stored(1, upper + 16, cm * 4);
            _tile_stored(2, lower, cm * 4);
            _tile_stored(3, lower + 16, cm * 4);
        }
}

}  // namespace
#else
namespace {
struct Tiles {
    Tiles() {}  // (a variable of this type is not unused)
};
}  // namespace
#endif
