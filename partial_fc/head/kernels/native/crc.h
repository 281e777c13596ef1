// CRC-32 as zlib has it (polynomial 0x04C11DB7, bits from the lowest), at the speed of the cache: many bytes are folded
// into 16 by products without carries, which x86 processors have, and those go through a table. (The idea: V. Gopal et
// al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.) Both ways of folding can
// write what they read to another place: a copy with its CRC is one pass.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crc {

// Polynomials over two elements of degree below 32: bit i stands for x^(31 - i).
constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // the polynomial without x^32

constexpr uint32_t times_x(uint32_t p) { return p >> 1 ^ (p & 1 ? POLYNOMIAL : 0); }

// x^n modulo the polynomial
constexpr uint32_t power(int n) {
    uint32_t p = 0x80000000;
    for (int i = 0; i < n; i++) p = times_x(p);
    return p;
}

constexpr std::array<uint32_t, 256> table_of_bytes() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t p = byte;
        for (int i = 0; i < 8; i++) p = times_x(p);
        table[byte] = p;
    }
    return table;
}

// state: the register, which begins as all ones and whose complement is the result
inline uint32_t bytewise(uint32_t state, const uint8_t* data, int64_t n) {
    static constexpr auto table = table_of_bytes();
    for (; n > 0; n--) state = state >> 8 ^ table[(state ^ *data++) & 255];
    return state;
}

#if defined(__x86_64__)
#define FOLDS128 __attribute__((target("pclmul,sse2"), always_inline)) inline
#define FOLDS512 __attribute__((target("vpclmulqdq,avx512f,pclmul"), always_inline)) inline

// 16 bytes V stand for V(x), the first bit for x^127. What they add to the bytes `bits` further on is V(x) * x^bits: their
// first half times x^(bits + 64), their second one times x^bits, both modulo the polynomial. A product of two halves as
// the processor forms it comes out times x, hence the - 1.
constexpr uint64_t first_factor(int bits) { return (uint64_t)power(bits + 63) << 32; }
constexpr uint64_t second_factor(int bits) { return (uint64_t)power(bits - 1) << 32; }

template <int bits> FOLDS128 __m128i folded(__m128i v, __m128i onto) {
    constexpr uint64_t first = first_factor(bits), second = second_factor(bits);
    const __m128i k = _mm_set_epi64x(second, first);
    return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(v, k, 0x00), _mm_clmulepi64_si128(v, k, 0x11)));
}
FOLDS128 __m128i load128(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }

FOLDS128 uint32_t finish(__m128i v, const uint8_t* rest, int64_t n) {
    for (; n >= 16; n -= 16, rest += 16) v = folded<128>(v, load128(rest));
    uint8_t last[16];
    std::memcpy(last, &v, 16);
    return bytewise(bytewise(0, last, 16), rest, n);
}

// The bytes at p + at. COPY: they go to to + at, past the caches, as nobody reads a copy soon.
template <bool COPY> FOLDS128 __m128i taken128(const uint8_t* p, uint8_t* to, int64_t at) {
    __m128i v = load128(p + at);
    if (COPY) _mm_stream_si128((__m128i*)(to + at), v);
    return v;
}

// n >= 128. COPY: also copies; `to` is a multiple of 16.
template <bool COPY>
__attribute__((target("pclmul,sse2"))) inline uint32_t by_128_bits(uint32_t state, const uint8_t* p, int64_t n, uint8_t* to) {
    __m128i v[8];
    for (int i = 0; i < 8; i++) v[i] = taken128<COPY>(p, to, 16 * i);
    v[0] = _mm_xor_si128(v[0], _mm_cvtsi32_si128((int)state));
    int64_t at = 128;
    for (; at + 128 <= n; at += 128)
        for (int i = 0; i < 8; i++) v[i] = folded<1024>(v[i], taken128<COPY>(p, to, at + 16 * i));
    if (COPY) std::memcpy(to + at, p + at, n - at), _mm_sfence();
    for (int i = 1; i < 8; i++) v[i] = folded<128>(v[i - 1], v[i]);
    return finish(v[7], p + at, n - at);
}

template <int bits> FOLDS512 __m512i folded512(__m512i v, __m512i onto) {
    constexpr uint64_t first = first_factor(bits), second = second_factor(bits);
    const __m512i k = _mm512_set_epi64(second, first, second, first, second, first, second, first);
    __m512i low = _mm512_clmulepi64_epi128(v, k, 0x00), high = _mm512_clmulepi64_epi128(v, k, 0x11);
    return _mm512_ternarylogic_epi64(onto, low, high, 0x96);  // xor of the three
}

template <bool COPY> FOLDS512 __m512i taken512(const uint8_t* p, uint8_t* to, int64_t at) {
    __m512i v = _mm512_loadu_si512(p + at);
    if (COPY) _mm512_stream_si512((__m512i*)(to + at), v);
    return v;
}

// Bytes of memory are taken from so many places at a time, so far from each other: a core waits for one row of pages at
// the rate of 8.5 GB/s, for four at that of 11.7.
constexpr int STREAMS = 4;
constexpr int64_t STRIDE = 16384;

// n >= 256. COPY: also copies; `to` is a multiple of 64.
template <bool COPY>
__attribute__((target("vpclmulqdq,avx512f,pclmul"))) inline uint32_t by_512_bits(uint32_t state, const uint8_t* p, int64_t n, uint8_t* to) {
    __m512i v[4];
    for (int i = 0; i < 4; i++) v[i] = taken512<COPY>(p, to, 64 * i);
    v[0] = _mm512_xor_si512(v[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    int64_t at = 256;
    for (; at + STREAMS * STRIDE <= n; at += STREAMS * STRIDE) {
        __m512i u[STREAMS][4];
        for (int s = 0; s < STREAMS; s++)
            for (int i = 0; i < 4; i++) u[s][i] = taken512<COPY>(p, to, at + s * STRIDE + 64 * i);
        for (int i = 0; i < 4; i++) u[0][i] = folded512<2048>(v[i], u[0][i]);
        for (int64_t off = 256; off < STRIDE; off += 256)
            for (int i = 0; i < 4; i++)
                for (int s = 0; s < STREAMS; s++)
                    u[s][i] = folded512<2048>(u[s][i], taken512<COPY>(p, to, at + s * STRIDE + off + 64 * i));
        for (int i = 0; i < 4; i++) v[i] = u[0][i];
        for (int s = 1; s < STREAMS; s++)
            for (int i = 0; i < 4; i++) v[i] = folded512<8 * STRIDE>(v[i], u[s][i]);
    }
    for (; at + 256 <= n; at += 256)
        for (int i = 0; i < 4; i++) v[i] = folded512<2048>(v[i], taken512<COPY>(p, to, at + 64 * i));
    if (COPY) std::memcpy(to + at, p + at, n - at), _mm_sfence();
    for (int i = 1; i < 4; i++) v[i] = folded512<512>(v[i - 1], v[i]);
    __m128i lane[4];
    std::memcpy(lane, &v[3], 64);
    for (int i = 1; i < 4; i++) lane[i] = folded<128>(lane[i - 1], lane[i]);
    return finish(lane[3], p + at, n - at);
}
#endif

// The bits that are folded at a time here: 512, 128, or 8 where there is nothing better than the table.
inline int best_width() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f")) return 512;
    if (__builtin_cpu_supports("pclmul")) return 128;
#endif
    return 8;
}

// crc: of the bytes before; 0: there are none. COPY: the bytes go to `to`, too; else it is not looked at.
template <bool COPY> uint32_t update(uint32_t crc, const uint8_t* data, int64_t n, int width, uint8_t* to) {
    uint32_t state = ~crc;
#if defined(__x86_64__)
    if (width >= 128 && n >= 512) {
        if (COPY) {  // what comes before the next cache line
            const int64_t head = -(uintptr_t)to & 63;
            std::memcpy(to, data, head);
            state = bytewise(state, data, head);
            data += head, to += head, n -= head;
        }
        return ~(width == 512 ? by_512_bits<COPY> : by_128_bits<COPY>)(state, data, n, to);
    }
    if (width >= 128 && n >= 128 && !COPY) return ~by_128_bits<false>(state, data, n, nullptr);
#endif
    if (COPY) std::memcpy(to, data, n);
    return ~bytewise(state, data, n);
}

}  // namespace crc
