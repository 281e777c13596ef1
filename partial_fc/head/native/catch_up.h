// What a dense optimizer does to rows in steps without gradient (rows/catch_up.py).
namespace {

class CatchUp {
  public:
    explicit CatchUp(const Job& job) : job(job), w(job.D + LANES), first(job.D + LANES), second(job.D + LANES) {}

    // Brings those of the rows at [begin, end) that lag behind to job.touched_step; returns how many it has left as they are.
    int64_t run(int64_t begin, int64_t end) {
        int64_t left = 0;
        for (int64_t k = begin; k < end; k++) {
            const int64_t row = job.row ? job.row[k] : k;
            if (k + 1 < end) soon(job.row ? job.row[k + 1] : k + 1);
            if (job.touched[row] >= job.touched_step) continue;
            const int64_t since = std::max<int64_t>(job.touched[row], job.first_step);
            const bool closed = since == 0 || since >= job.least_step;  // (0: it never took part)
            if (job.optimizer == kAdamW && (!closed || job.scalar[0][row] != (float)since)) {
                left++;
                continue;
            }
            float* centre = opened(job.centre, job.centre_dtype, row, w);
            float* m = opened(job.wide[0], job.wide_dtype, row, first);
            const double* sums = job.sums + since - job.first_step;
            if (job.optimizer == kSGD) {
                sgd(centre, m, sums);
            } else {
                float* v = opened(job.wide[1], job.wide_dtype, row, second);
                adamw(centre, m, v, sums, since);
                job.scalar[0][row] = (float)job.touched_step;
                if (v == second) close(job.wide[1], job.wide_dtype, row, k, v, job.wide_key[1]);
            }
            if (m == first) close(job.wide[0], job.wide_dtype, row, k, m, job.wide_key[0]);
            if (centre == w) close(job.centre, job.centre_dtype, row, k, centre, job.centre_key);
            job.touched[row] = (int32_t)job.touched_step;
        }
        return left;
    }

  private:
    void soon(int64_t row) const {
        prefetch_row(job.centre, job.centre_dtype, row, job.D);
        for (void* table : job.wide)
            if (table) prefetch_row(table, job.wide_dtype, row, job.D);
    }

    // A row as floats: where it lies, or a copy.
    float* opened(void* table, int32_t dtype, int64_t row, float* copy) const {
        if (dtype == kFloat32) return (float*)table + row * job.D;
        read_row(table, dtype, row, job.D, copy);
        return copy;
    }
    void close(void* table, int32_t dtype, int64_t row, int64_t k, const float* copy, uint32_t key) const {
        write_row(table, dtype, row, job.D, copy, row_key(job.first_row + (job.number ? job.number[k] : row), key));
    }

    // sums: ww, wm, mw, mm
    void sgd(float* w, float* m, const double* sums) const {
        const int64_t to = job.sums_stride;
        const float ww = (float)sums[0], wm = (float)sums[to], mw = (float)sums[2 * to], mm = (float)sums[3 * to];
        for (int64_t d = 0; d < job.D; d++) {
            const float from_m = m[d] * wm;
            m[d] = m[d] * mm + w[d] * mw;
            w[d] = w[d] * ww + from_m;
        }
    }

    // sums: P, a_0 to a_4
    void adamw(float* w, float* m, float* v, const double* sums, int64_t since) const {
        const double missed = (double)(job.touched_step - since);
        float a[5];
        for (int k = 0; k < 5; k++) a[k] = (float)sums[(k + 1) * job.sums_stride];
        const float keep = (float)sums[0], fade1 = (float)std::pow(job.fade1, missed), fade2 = (float)std::pow(job.fade2, missed);
        const float near = (float)(job.eps * std::sqrt((1 - std::pow(job.fade2, since + 1.0)) / job.fade2));
        for (int64_t d = 0; d < job.D; d++) {
            const float inverse = 1 / (std::sqrt(v[d]) + near), z = near * inverse;
            const float sum = (a[0] - z * (a[1] - z * (a[2] - z * (a[3] - z * a[4])))) * inverse;
            w[d] = w[d] * keep - sum * m[d];
            m[d] *= fade1;
            v[d] *= fade2;
        }
    }

    const Job& job;
    Buffer w, first, second;
};

}  // namespace
