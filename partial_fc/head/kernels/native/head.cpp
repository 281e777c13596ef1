// The head's two passes over the class centres, on all threads of a process. Compiled once for each instruction set
// (build.py); Python chooses one and calls it through the C functions at the end of this file.
//
// One centre is used three times in a pass while it is in the cache: for its length, for its products with all G
// features, and for the gradient that they lead to. Nothing of size G*S or S*D is ever stored.
#include "vector.h"
// (these build on each other in this order)
#include "gemm.h"
#include "passes.h"

#include <exception>
#include <string>
#include <thread>

namespace {

// Runs work(thread, begin, end) on contiguous ranges of whole chunks: the split, and so every sum, depends on the
// number of threads alone.
template <class Work> void share(int64_t begin, int64_t end, int threads, int64_t chunk, Work work) {
    int64_t chunks = (end - begin + chunk - 1) / chunk;
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, chunks));
    auto at = [&](int t) { return std::min(end, begin + chunks * t / threads * chunk); };
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
    f.Gp = round_up(job.G, LANES), f.Dp = round_up(job.D, 2 * LANES);
    f.Kd = BF ? (job.D + 1) / 2 : job.D;
    f.pack_for_logits<BF>(job);
    return f;
}

template <bool BF> void sums(const Job& job) {
    Features f = features_of<BF>(job);
    struct Part { std::vector<double> denominator; Buffer pull, total; };
    std::vector<Part> parts(job.threads);
    share(0, job.S, job.threads, CHUNK - CHUNK % job.sub_centres, [&](int t, int64_t begin, int64_t end) {
        Part& part = parts[t];
        part.denominator.resize(f.Gp);
        if (job.pull) part.pull = Buffer(f.Gp * f.Dp);
        if (job.total) part.total = Buffer(f.Dp);
        Pass<BF>(job, f).sums(begin, end, part.denominator.data(), part.pull, part.total);
    });
    for (Part& part : parts) {  // in their order, so that the result repeats bit by bit
        if (part.denominator.empty()) continue;
        for (int64_t g = 0; g < job.G; g++) {
            job.denominator[g] += part.denominator[g];
            if (job.pull)
                for (int64_t d = 0; d < job.D; d++) job.pull[g * job.D + d] += part.pull[g * f.Dp + d];
        }
        if (job.total)
            for (int64_t d = 0; d < job.D; d++) job.total[d] += part.total[d];
    }
}

template <bool BF> void gradients(const Job& job) {
    Features f = features_of<BF>(job);
    f.pack_for_gradients<BF>(job);
    share(job.begin, job.end, job.threads, CHUNK - CHUNK % job.sub_centres, [&](int, int64_t begin, int64_t end) {
        auto nothing = [](int64_t) {};
        Pass<BF>(job, f).gradients(begin, end, nothing, [&](int64_t place, const float* centre, float* grad, Projection projection) {
            for (int64_t d = 0; d < f.Dp; d += LANES)
                store(grad + d, projection(load<vf>(grad + d), load<vf>(centre + d)));
            std::memcpy(job.grad + (place - job.begin) * job.D, grad, job.D * 4);
        });
    });
}

// SGD with momentum on the row while it and its gradient are in the cache.
template <bool BF> void update(const Job& job) {
    Features f = features_of<BF>(job);
    f.pack_for_gradients<BF>(job);
    share(0, job.S, job.threads, CHUNK - CHUNK % job.sub_centres, [&](int, int64_t begin, int64_t end) {
        Pass<BF> pass(job, f);
        Buffer momentum(f.Dp), moved(f.Dp);
        auto soon = [&](int64_t place) {
            prefetch_row(job.momentum, job.momentum_dtype, pass.row_of(place), job.D);
        };
        pass.gradients(begin, end, soon, [&](int64_t place, const float* centre, const float* grad, Projection projection) {
            int64_t row = pass.row_of(place), number = job.first_row + row;
            read_row(job.momentum, job.momentum_dtype, row, job.D, momentum);
            for (int64_t d = 0; d < f.Dp; d += LANES) {
                vf w = load<vf>(centre + d), g = projection(load<vf>(grad + d), w) + w * job.weight_decay;
                vf m = load<vf>(momentum + d) * job.momentum_factor + g;
                store(momentum + d, m);
                store(moved + d, w - (job.nesterov ? g + m * job.momentum_factor : m) * job.lr);
            }
            write_row(job.momentum, job.momentum_dtype, row, job.D, momentum, row_key(number, job.momentum_key));
            job.touched[row] = (int32_t)job.touched_step;
            write_row(job.centre, job.centre_dtype, row, job.D, moved, row_key(number, job.centre_key));
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
EXPORT int head_lanes() { return LANES; }
// The best of the instruction sets of build.py that this processor has.
EXPORT const char* head_best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
    if (avx512) return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}
