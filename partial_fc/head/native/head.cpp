// The head's two passes over the class centres, on all threads of a process. Compiled once for each instruction set
// (build.py); Python chooses one and calls it through the C functions at the end of this file.
//
// One centre is used three times in a pass while it is in the cache: for its length, for its products with all G
// features, and for the gradient that they lead to. Nothing of size G*S or S*D is ever stored.
#include "vector.h"
// (these build on each other in this order)
#include "tiles.h"
#include "gemm.h"
#include "table.h"
#include "threads.h"
#include "packing.h"
#include "nearest.h"
#include "logits.h"
#include "passes.h"
#include "optimizers.h"
#include "rows.h"
#include "catch_up.h"

#include <cerrno>
#include <cstddef>
#include <string>
#include <type_traits>

namespace {

// parts: of the threads, in the order of their classes.
void write_nearest(const Job& job, std::vector<Nearest>& parts) {
    share(0, job.G, job.threads, 1, [&](int, int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; g++) {
            for (size_t t = 1; t < parts.size(); t++)
                if (!parts[t].empty()) parts[0].take(g, parts[t]);
            parts[0].write(g, job.nearest_cos + g * job.num_nearest, job.nearest_class + g * job.num_nearest);
        }
    });
}

template <bool BF> void sums(const Job& job) {
    const Features<BF> f(job, true, false);
    struct Part { std::vector<double> denominator; Buffer weighted_sum; Nearest nearest; };
    std::vector<Part> parts(job.threads);
    const bool direct = f.Gp == job.G && f.Dp == job.D;  // without padding, the first thread adds to the result itself
    share(0, job.S, job.threads, whole_classes(job, BLOCK), [&](int t, int64_t begin, int64_t end) {
        Part& part = parts[t];
        part.denominator.resize(f.Gp);
        const bool own = job.weighted_sum && !(direct && t == 0);
        if (own) part.weighted_sum = Buffer(f.Gp * f.Dp);
        if (job.num_nearest) part.nearest = Nearest(f.Gp, job.num_nearest);
        Pass<BF>(job, f).sums(begin, end, part.denominator.data(), own ? part.weighted_sum : job.weighted_sum,
                              job.num_nearest ? &part.nearest : nullptr);
    });
    share(0, job.G, job.threads, 1, [&](int, int64_t begin, int64_t end) {
        for (const Part& part : parts) {  // in their order, so that the result repeats bit by bit
            if (part.denominator.empty()) continue;
            for (int64_t g = begin; g < end; g++) {
                job.denominator[g] += part.denominator[g];
                if (!part.weighted_sum) continue;
                float* to = job.weighted_sum + g * job.D;
                for (int64_t d = 0; d < job.D; d++) to[d] += part.weighted_sum[g * f.Dp + d];
            }
        }
    });
    if (!job.num_nearest) return;
    std::vector<Nearest> found;
    for (Part& part : parts) found.push_back(std::move(part.nearest));
    write_nearest(job, found);
}

template <bool BF> void nearest(const Job& job) {
    const Features<BF> f(job, true, false);
    std::vector<Nearest> parts(job.threads);
    share(0, job.S, job.threads, whole_classes(job, BLOCK), [&](int t, int64_t begin, int64_t end) {
        parts[t] = Nearest(f.Gp, job.num_nearest);
        Pass<BF>(job, f).nearest(begin, end, parts[t]);
    });
    write_nearest(job, parts);
}

template <bool BF> void gradients(const Job& job) {
    const Features<BF> f(job, true, true);
    share(job.begin, job.end, job.threads, whole_classes(job, BLOCK), [&](int, int64_t begin, int64_t end) {
        auto nothing = [](int64_t) {};
        Pass<BF>(job, f).gradients(begin, end, nothing, [&](int64_t place, const float* centre, float* grad, Projection projection) {
            for (int64_t d = 0; d < f.Dp; d += LANES)
                store(grad + d, projection(load<vf>(grad + d), load<vf>(centre + d)));
            std::memcpy(job.grad + (place - job.begin) * job.D, grad, job.D * 4);
        });
    });
}

// Every row moves while it and its gradient are in the cache.
template <bool BF> void update(const Job& job) {
    const Features<BF> f(job, !job.cache || job.cached_rows < job.S, true);
    share(0, job.S, job.threads, whole_classes(job, BLOCK), [&](int, int64_t begin, int64_t end) {
        Pass<BF> pass(job, f);
        RowStep step(job, f.Dp);
        auto soon = [&](int64_t place) { step.soon(pass.row_of(place)); };
        pass.gradients(begin, end, soon, [&](int64_t place, const float* centre, float* grad, Projection projection) {
            step.move(pass.row_of(place), centre, grad, projection);
        });
    });
}

thread_local std::string error;

template <class Function> const char* guarded(Function function) {
    try {
        function();
        return nullptr;
    } catch (const std::exception& e) {
        error = e.what();
        return error.c_str();
    }
}

}  // namespace

// Each returns null, or what went wrong.
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* head_sums(const Job* j) {
    return guarded([&] { j->low_precision ? sums<true>(*j) : sums<false>(*j); });
}
EXPORT const char* head_nearest(const Job* j) {
    return guarded([&] { j->low_precision ? nearest<true>(*j) : nearest<false>(*j); });
}
EXPORT const char* head_gradients(const Job* j) {
    return guarded([&] { j->low_precision ? gradients<true>(*j) : gradients<false>(*j); });
}
EXPORT const char* head_update(const Job* j) {
    return guarded([&] { j->low_precision ? update<true>(*j) : update<false>(*j); });
}
EXPORT const char* head_row_targets(const RowJob* j) {
    return guarded([&] { share(0, j->G, j->threads, 1, [&](int, int64_t begin, int64_t end) { RowMath(*j).targets(begin, end); }); });
}
EXPORT const char* head_row_gradients(const RowJob* j) {
    return guarded([&] { share(0, j->G, j->threads, 1, [&](int, int64_t begin, int64_t end) { RowMath(*j).gradients(begin, end); }); });
}
EXPORT const char* head_catch_up(const Job* j) {
    return guarded([&] {
        std::vector<int64_t> left(j->threads);
        share(0, j->S, j->threads, 64, [&](int t, int64_t begin, int64_t end) { left[t] = CatchUp(*j).run(begin, end); });
        for (int64_t rows : left) *j->left += rows;
    });
}
// A letter of Python's module struct.
template <class T> char letter() {
    if (std::is_pointer<T>::value) return 'P';
    if (std::is_same<T, float>::value) return 'f';
    if (std::is_same<T, double>::value) return 'd';
    if (std::is_same<T, uint32_t>::value) return 'I';
    return sizeof(T) == 8 ? 'q' : 'i';
}
template <class T> std::string kind() { return letter<std::remove_extent_t<T>>() + (" " + std::to_string(std::extent<T>::value)); }
// Size of a struct; then name, letter, length (0: no array) and offset of each field, a line each.
#define FIELD(name) + "\n" #name " " + kind<decltype(Struct::name)>() + " " + std::to_string(offsetof(Struct, name))
EXPORT const char* head_job_layout() {
    using Struct = Job;
    static const std::string text = std::to_string(sizeof(Struct)) FIELDS_OF_JOB(FIELD);
    return text.c_str();
}
EXPORT const char* head_row_job_layout() {
    using Struct = RowJob;
    static const std::string text = std::to_string(sizeof(Struct)) FIELDS_OF_ROW_JOB(FIELD);
    return text.c_str();
}
// The length of a row of Job.cache.
EXPORT int64_t head_cache_row(int64_t G, int32_t low_precision) {
    return low_precision ? cache_row<true>(G) : cache_row<false>(G);
}
// To be called once, before the others.
EXPORT const char* head_prepare() {
#if defined(__AMX_TILE__)
    // Linux gives a process the tiles on demand, since they make the frames of its signal handlers larger
    // (Documentation/arch/x86/xstate.rst): ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    if (syscall(SYS_arch_prctl, 0x1023, 18)) {
        error = std::string("the operating system does not let this process use AMX tiles: ") + std::strerror(errno);
        return error.c_str();
    }
#endif
    return nullptr;
}
// The best of the instruction sets of build.py that this processor and the operating system have.
EXPORT const char* head_best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16")) return "amx";
    if (bf16) return "avx512_bf16";
    if (avx512) return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}
// n rows of a table to places in another one.
EXPORT void head_copy_rows(void* to, const void* from, int64_t row_bytes, const int64_t* to_row, const int64_t* from_row, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        std::memcpy((char*)to + to_row[i] * row_bytes, (const char*)from + from_row[i] * row_bytes, row_bytes);
}
