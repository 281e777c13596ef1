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
#include "passes.h"
#include "optimizers.h"

#include <cerrno>
#include <exception>
#include <string>
#include <thread>

namespace {

// Runs work(thread, begin, end) on contiguous ranges of whole blocks: the split, and so every sum, depends on the
// number of threads alone.
template <class Work> void share(int64_t begin, int64_t end, int threads, int64_t block, Work work) {
    int64_t blocks = (end - begin + block - 1) / block;
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, blocks));
    auto at = [&](int t) { return std::min(end, begin + blocks * t / threads * block); };
    std::vector<std::exception_ptr> failed(threads);
    auto run = [&](int t) {
        try {
            work(t, at(t), at(t + 1));
        } catch (...) {
            failed[t] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(run, t);
    run(0);
    for (auto& thread : others) thread.join();
    for (auto& error : failed)
        if (error) std::rethrow_exception(error);
}

template <bool BF> Features features_of(const Job& job) {
    Features f;
    f.G = job.G, f.D = job.D;
    f.Gp = round_up(job.G, Padding<BF>::columns), f.Dp = round_up(job.D, std::max<int64_t>(2 * LANES, Padding<BF>::columns));
    f.Kd = round_up(BF ? (job.D + 1) / 2 : job.D, Padding<BF>::words);
    f.pack_for_logits<BF>(job);
    return f;
}

template <bool BF> void sums(const Job& job) {
    Features f = features_of<BF>(job);
    struct Part { std::vector<double> denominator; Buffer weighted_sum, centre_sum; };
    std::vector<Part> parts(job.threads);
    share(0, job.S, job.threads, block_of(job), [&](int t, int64_t begin, int64_t end) {
        Part& part = parts[t];
        part.denominator.resize(f.Gp);
        if (job.weighted_sum) part.weighted_sum = Buffer(f.Gp * f.Dp);
        if (job.centre_sum) part.centre_sum = Buffer(f.Dp);
        Pass<BF>(job, f).sums(begin, end, part.denominator.data(), part.weighted_sum, part.centre_sum);
    });
    for (Part& part : parts) {  // in their order, so that the result repeats bit by bit
        if (part.denominator.empty()) continue;
        for (int64_t g = 0; g < job.G; g++) {
            job.denominator[g] += part.denominator[g];
            if (job.weighted_sum)
                for (int64_t d = 0; d < job.D; d++) job.weighted_sum[g * job.D + d] += part.weighted_sum[g * f.Dp + d];
        }
        if (job.centre_sum)
            for (int64_t d = 0; d < job.D; d++) job.centre_sum[d] += part.centre_sum[d];
    }
}

template <bool BF> void gradients(const Job& job) {
    Features f = features_of<BF>(job);
    f.pack_for_gradients<BF>(job);
    share(job.begin, job.end, job.threads, block_of(job), [&](int, int64_t begin, int64_t end) {
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
    Features f = features_of<BF>(job);
    f.pack_for_gradients<BF>(job);
    share(0, job.S, job.threads, block_of(job), [&](int, int64_t begin, int64_t end) {
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
EXPORT const char* head_gradients(const Job* j) {
    return guarded([&] { j->low_precision ? gradients<true>(*j) : gradients<false>(*j); });
}
EXPORT const char* head_update(const Job* j) {
    return guarded([&] { j->low_precision ? update<true>(*j) : update<false>(*j); });
}
// The size of Job.cache: G padded, and how many centres make a block.
EXPORT int64_t head_padded(int64_t G) { return round_up(G, Padding<true>::columns); }
EXPORT int64_t head_block(const Job* j) { return block_of(*j); }
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
