// Rows of tables in memory: their dtypes, the noise that rounds them, and buffers to work on them.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sys/mman.h>
#include <utility>

#include "job.h"

namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;

struct Free { void operator()(void* p) const { std::free(p); } };
enum class Fill { zeros, nothing };
struct Buffer {  // floats, aligned to a cache line; large ones in pages of 2 MiB where the system has them
    std::unique_ptr<float, Free> p;
    Buffer() = default;
    explicit Buffer(int64_t n, Fill fill = Fill::zeros) {
        const int64_t page = n * 4 >= HUGE_PAGE ? HUGE_PAGE : 64, bytes = round_up(std::max<int64_t>(n, 16) * 4, page);
        p.reset((float*)std::aligned_alloc(page, bytes));
        if (!p) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (page == HUGE_PAGE) madvise(p.get(), bytes, MADV_HUGEPAGE);  // (it may refuse: then the pages are small)
#endif
        if (fill == Fill::zeros) std::memset(p.get(), 0, round_up(n * 4, 64));
    }
    operator float*() const { return p.get(); }
};

inline int64_t size_of(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// ---- rows of a table in its dtype, as floats; D need not be a multiple of anything, `out` has room for the padding
inline void read_row(const void* table, int32_t dtype, int64_t row, int64_t D, float* out) {
    const char* p = (const char*)table + row * D * size_of(dtype);
    int64_t d = 0;
    if (dtype == kFloat32) {
        std::memcpy(out, p, D * 4);
    } else if (dtype == kBfloat16) {
        for (; d + LANES <= D; d += LANES) store(out + d, from_bf16(load<vh>(p + 2 * d)));
        for (; d < D; d++) {
            uint32_t word = (uint32_t)load<uint16_t>(p + 2 * d) << 16;
            std::memcpy(out + d, &word, 4);
        }
    } else {
        for (; d < D; d++) out[d] = from_fp16(load<uint16_t>(p + 2 * d));
    }
}

inline void prefetch_words(const float* p, int64_t n) {
    for (int64_t at = 0; at < n; at += 16) __builtin_prefetch(p + at, 0, 2);
}

inline void prefetch_row(const void* table, int32_t dtype, int64_t row, int64_t D) {
    const char* p = (const char*)table + row * D * size_of(dtype);
    for (int64_t at = 0; at < D * size_of(dtype); at += 64) __builtin_prefetch(p + at, 0, 2);
}

// The noise of a row (counter_rng.py, rounding_bits), for 2 * LANES columns at a time: columns 2 j and 2 j + 1 are the lower
// and the upper half of one 32-bit number.
struct Noise {
    vu next_pair;
    explicit Noise(uint32_t row_key) : next_pair(splat(row_key)) {
        for (int i = 0; i < LANES; i++) next_pair[i] += i;
    }
    std::pair<vu, vu> next() {
        vhh bits = (vhh)mix(next_pair), first{}, second{};
        next_pair += LANES;
        for (int i = 0; i < LANES; i++) {  // each half widened to a lane of its own, beside a 0
            first[2 * i] = i, first[2 * i + 1] = 2 * LANES;
            second[2 * i] = LANES + i, second[2 * i + 1] = 2 * LANES;
        }
        return {(vu)__builtin_shuffle(bits, vhh{}, first), (vu)__builtin_shuffle(bits, vhh{}, second)};
    }
};

// bfloat16 is rounded up or down at random, with the noise of counter_rng.py for this row: right on average, so that steps
// smaller than a unit in the last place are not lost.
inline void write_row(void* table, int32_t dtype, int64_t row, int64_t D, const float* in, uint32_t row_key) {
    char* p = (char*)table + row * D * size_of(dtype);
    if (dtype == kFloat32) {
        std::memcpy(p, in, D * 4);
    } else if (dtype == kFloat16) {
        for (int64_t d = 0; d < D; d++) store(p + 2 * d, to_fp16(in[d]));
    } else {
        Noise noise(row_key);
        for (int64_t d = 0; d < D; d += 2 * LANES) {
            auto [first, second] = noise.next();
            vhh rounded = to_bf16(load<vf>(in + d), load<vf>(in + d + LANES), first, second);
            std::memcpy(p + 2 * d, &rounded, d + 2 * LANES <= D ? 4 * LANES : 2 * (D - d));
        }
    }
}

inline uint32_t row_key(int64_t row, uint32_t key) {
    return mix(mix((uint32_t)row + key) ^ (uint32_t)(row >> 32));
}

}  // namespace
