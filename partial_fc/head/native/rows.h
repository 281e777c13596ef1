// What happens to a row of the global batch beside the passes (softmax.py): before them its length and the cosine with its target,
// after them the rest of its gradient. Target centres are read where they lie.
#include <stdexcept>
#include <string>

namespace {

class RowMath {
  public:
    explicit RowMath(const RowJob& job) : job(job), D(job.D), Dp(round_up(D, LANES)), x(Dp), y(Dp), pulls(Dp), unit(Dp) {}

    void targets(int64_t begin, int64_t end) {
        for (int64_t i = begin * job.T; i < end * job.T; i++) find(i);
        for (int64_t g = begin; g < end; g++) {
            soon(g + 4, end);
            read(job.feat + g * job.feat_stride, job.feat_dtype, 0, x);
            const float norm = length(x), divisor = divisor_of(norm, 1.f);
            for (int64_t d = 0; d < Dp; d += LANES) store(x + d, load<vf>(x + d) / divisor);
            std::memcpy(job.unit + g * D, x, D * 4);
            job.norm[g] = norm;
            for (int64_t i = g * job.T; i < (g + 1) * job.T; i++) {
                job.cos[i] = 0;
                if (job.position[i] >= 0) nearest(i);
            }
        }
    }

    void gradients(int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; g++) {
            soon(g + 4, end);
            read(job.sum, kFloat32, g, x);
            read(job.unit, kFloat32, g, unit);
            float pull = 0;
            if (job.T == 1 && job.position[g] >= 0) pull = read_target(g);
            else std::memset(y, 0, Dp * 4);
            if (job.T > 1) {
                std::memset(pulls, 0, Dp * 4);
                for (int64_t i = g * job.T; i < (g + 1) * job.T; i++) {
                    if (job.position[i] < 0) continue;
                    const float each = read_target(i);
                    for (int64_t d = 0; d < Dp; d += LANES) store(pulls + d, load<vf>(pulls + d) + load<vf>(y + d) * each);
                }
                pull = 1;
            }
            const float *target = job.T > 1 ? pulls : y, weight = job.weight[g];
            vf along{};
            for (int64_t d = 0; d < Dp; d += LANES) {
                const vf grad = load<vf>(x + d) * weight + load<vf>(target + d) * pull;
                store(x + d, grad);
                along += grad * load<vf>(unit + d);
            }
            const float part = add_up(along), divisor = divisor_of(job.norm[g], INFINITY);
            for (int64_t d = 0; d < Dp; d += LANES) store(x + d, (load<vf>(x + d) - load<vf>(unit + d) * part) / divisor);
            std::memcpy(job.sum + g * D, x, D * 4);
        }
    }

  private:
    // A row, and zeros up to Dp.
    void read(const void* table, int32_t dtype, int64_t row, float* to) const {
        read_row(table, dtype, row, D, to);
        std::memset(to + D, 0, (Dp - D) * 4);
    }

    // The i-th target's centre -> y; its gradient, over the centre's length.
    float read_target(int64_t i) const {
        read(job.table, job.table_dtype, row_of(job.position[i]), y);
        return job.target_grad[i] / divisor_of(length(y), 1.f);
    }

    // Where the i-th target's first centre is among the active rows, or -1.
    void find(int64_t i) {
        const int64_t local = job.label[i] - job.start;
        job.elsewhere[i] = local < 0 || local >= job.num_local;
        int64_t place = local * job.sub_centres;
        if (job.elsewhere[i]) place = -1;
        else if (job.active) {
            const int64_t* found = std::lower_bound(job.active, job.active + job.S, place);
            if (found == job.active + job.S || *found != place)
                throw std::logic_error("class " + std::to_string(job.label[i]) + ", row " + std::to_string(i / job.T) +
                                       " of the global batch, is not among the active rows");
            place = found - job.active;
        }
        job.position[i] = place;
    }

    void nearest(int64_t i) {
        float most = -INFINITY;
        const int64_t first = job.position[i];
        for (int64_t place = first; place < first + job.sub_centres; place++) {
            read(job.table, job.table_dtype, row_of(place), y);
            vf dot{};
            for (int64_t d = 0; d < Dp; d += LANES) dot += load<vf>(x + d) * load<vf>(y + d);
            const float cos = add_up(dot) / divisor_of(length(y), 1.f);
            if (cos <= most) continue;
            job.cos[i] = most = cos;
            job.position[i] = place;
            if (!(cos == cos)) return;  // NaN is to be seen
        }
    }

    // Sends for the target centres of a row to come.
    void soon(int64_t g, int64_t end) const {
        for (int64_t i = g * job.T; g < end && i < (g + 1) * job.T; i++)
            if (job.position[i] >= 0) prefetch_row(job.table, job.table_dtype, row_of(job.position[i]), D);
    }

    int64_t row_of(int64_t place) const { return job.row ? job.row[place] : place; }

    float length(const float* v) const {
        vf square{};
        for (int64_t d = 0; d < Dp; d += LANES) square += load<vf>(v + d) * load<vf>(v + d);
        return std::sqrt(add_up(square));
    }

    // (plain.py, unit: a row of length 0 stays 0, one whose length is beyond floats becomes NaN.)
    static float divisor_of(float norm, float of_nothing) { return norm <= 0 ? of_nothing : norm < INFINITY ? norm : NAN; }

    const RowJob& job;
    const int64_t D, Dp;
    Buffer x, y, pulls, unit;
};

}  // namespace
