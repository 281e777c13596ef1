// The threads of a call: they wait between calls, since starting them anew costs more than a small call does.
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

class Team {
  public:
    // Runs work(0), ..., work(threads - 1), the first of them here. What one of them throws is thrown here at the end.
    void run(int threads, const std::function<void(int)>& work) {
        std::lock_guard<std::mutex> one_call_at_a_time(calls);
        failed.assign(threads, nullptr);
        {
            std::lock_guard<std::mutex> lock(mutex);
            while ((int)others.size() < threads - 1) others.emplace_back(&Team::wait, this, (int)others.size() + 1, round);
            job = &work, wanted = threads, left = threads - 1;
            round++;
        }
        if (threads > 1) wake.notify_all();
        attempt(0, work);
        std::unique_lock<std::mutex> lock(mutex);
        done.wait(lock, [&] { return left == 0; });
        for (auto& error : failed)
            if (error) std::rethrow_exception(error);
    }

    // The process's. A forked process has none of its parent's threads, and gets its own team; none ever ends, since a
    // process may end while they wait.
    static Team& ours() {
        static std::mutex mutex;
        static Team* team = nullptr;
        static pid_t owner = 0;
        std::lock_guard<std::mutex> lock(mutex);
        if (owner != getpid()) team = new Team, owner = getpid();
        return *team;
    }

  private:
    void attempt(int number, const std::function<void(int)>& work) {
        try {
            work(number);
        } catch (...) {
            failed[number] = std::current_exception();
        }
    }

    void wait(int number, int64_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return round != seen; });
            seen = round;
            if (number >= wanted) continue;
            const auto& work = *job;
            lock.unlock();
            attempt(number, work);
            lock.lock();
            if (--left == 0) done.notify_one();
        }
    }

    std::mutex calls, mutex;  // (mutex: of what follows)
    std::condition_variable wake, done;
    std::vector<std::thread> others;
    const std::function<void(int)>* job = nullptr;
    int64_t round = 0;
    int wanted = 0, left = 0;
    std::vector<std::exception_ptr> failed;  // one for each thread
};

// Runs work(thread, begin, end) on contiguous ranges of whole blocks: the split, and so every sum, depends on the
// number of threads alone.
template <class Work> void share(int64_t begin, int64_t end, int threads, int64_t block, Work work) {
    int64_t blocks = (end - begin + block - 1) / block;
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, blocks));
    auto at = [&](int t) { return std::min(end, begin + blocks * t / threads * block); };
    Team::ours().run(threads, [&](int t) { work(t, at(t), at(t + 1)); });
}

}  // namespace
