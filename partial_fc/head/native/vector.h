// Vectors of LANES floats in GCC's vector extension: the same source for every instruction set; only the product of
// two bfloat16 pairs has an instruction of its own. Included once in each file that fixes the instruction set.
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t vhh __attribute__((vector_size(4 * LANES)));

template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
// Past the caches, where the instruction set can: what is read much later would only push out what is needed now. The place is
// aligned to the vector. Others see it after settle_streams().
template <class V> inline void stream(void* p, V v) {
#if defined(__AVX512F__)
    if constexpr (sizeof v == 64) return _mm512_stream_si512((__m512i*)p, (__m512i)v);
#endif
#if defined(__AVX2__)
    if constexpr (sizeof v == 32) return _mm256_stream_si256((__m256i*)p, (__m256i)v);
    if constexpr (sizeof v == 16) return _mm_stream_si128((__m128i*)p, (__m128i)v);
#endif
    store(p, v);
}
inline void settle_streams() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}
inline vf splat(float x) { return x - vf{}; }
inline vu splat(uint32_t x) { return x - vu{}; }
inline float add_up(vf v) { float s = 0; for (int i = 0; i < LANES; i++) s += v[i]; return s; }
inline bool is_zero(vi v) { int32_t any = 0; for (int i = 0; i < LANES; i++) any |= v[i]; return !any; }
inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }

// Lane l of vector v moves to lane v of vector l: in squares of 2 * HALF, the upper right quarter and the lower left one
// change places, then the same within the quarters.
template <int HALF = LANES / 2> inline void transpose(vu (&rows)[LANES]) {
    if constexpr (HALF > 0) {
        vu lane{};
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const vu is_left = (lane & HALF) == 0;
        const vu upper = is_left ? lane : lane - HALF + LANES, lower = is_left ? lane + HALF : lane + LANES;
#pragma GCC unroll 16
        for (int v = 0; v < LANES; v++) {
            if (v & HALF) continue;
            vu above = rows[v], below = rows[v + HALF];
            rows[v] = __builtin_shuffle(above, below, upper);
            rows[v + HALF] = __builtin_shuffle(above, below, lower);
        }
        transpose<HALF / 2>(rows);
    }
}

// The same for a matrix of words, whose sizes are multiples of LANES; from_row, to_row: words from a row to the next.
inline void transpose(const float* from, int64_t num_rows, int64_t num_columns, int64_t from_row, float* to,
                      int64_t to_row) {
    for (int64_t column = 0; column < num_columns; column += LANES)
        for (int64_t row = 0; row < num_rows; row += LANES) {
            vu square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) square[i] = load<vu>(from + (row + i) * from_row + column);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(to + (column + i) * to_row + row, square[i]);
        }
}

// ---- bfloat16: the upper half of a float
inline vf from_bf16(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
inline vh to_bf16(vf x) {  // to nearest, ties to even; NaN stays NaN (the instruction makes subnormal numbers 0)
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#endif
    vu u = (vu)x;
    vu rounded = u + 0x7FFF + ((u >> 16) & 1);
    rounded = (vu)(x == x) ? rounded : (u | 0x400000);
    return __builtin_convertvector(rounded >> 16, vh);
}

// Words of two: `low` and `high` of each lane.
inline vu pair(vh low, vh high) {
    return __builtin_convertvector(low, vu) | (__builtin_convertvector(high, vu) << 16);
}

// Two vectors, each number to one of its neighbours, up with the probability that its noise (16 random bits in the
// lower half of the lane) gives it; what is not finite only loses its lower half.
inline vhh to_bf16(vf x, vf y, vu noise_x, vu noise_y) {
    vhh odd{};
    for (int i = 0; i < 2 * LANES; i++) odd[i] = 2 * i + 1;
    const vu exponent = splat(0x7F800000u);
    noise_x &= (vu)(((vu)x & exponent) != exponent);
    noise_y &= (vu)(((vu)y & exponent) != exponent);
    return __builtin_shuffle((vhh)((vu)x + noise_x), (vhh)((vu)y + noise_y), odd);
}

// ---- float16: for storage only
inline float from_fp16(uint16_t h) { _Float16 f; std::memcpy(&f, &h, 2); return (float)f; }
inline uint16_t to_fp16(float x) { _Float16 f = (_Float16)x; uint16_t h; std::memcpy(&h, &f, 2); return h; }

// a += b * c for floats, or for pairs of bfloat16 that share a lane (accumulated in float)
template <bool BF> inline vf fma(vf a, vf b, vf c) {
    if constexpr (!BF) return a + b * c;
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)a, (__m512bh)b, (__m512bh)c);
#else
    const vu high = splat(0xFFFF0000u);
    a += (vf)((vu)b << 16) * (vf)((vu)c << 16);
    return a + (vf)((vu)b & high) * (vf)((vu)c & high);
#endif
}

// exp to 1 or 2 units in the last place; 0 below -87.3 (where a float has no normal number left), up to 88.
inline vf exp(vf x) {
    const float magic = 12582912.f;  // adding it leaves no bits after the point
    vi tiny = x < -87.3f;
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = splat(1.f / 5040);
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return select(tiny, vf{}, p * (vf)power);
}

// partial_fc/counter_rng.py: mix
template <class U> inline U mix(U x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

}  // namespace
