// The optimizers of rows/optimizers.py, on one row whose centre and gradient are in the cache.
namespace {

inline vf root(vf x) {
    float a[LANES];
    store(a, x);
    for (int i = 0; i < LANES; i++) a[i] = std::sqrt(a[i]);
    return load<vf>(a);
}

// SGD with momentum: centre w and momentum m of some columns, given the gradient by w.
struct SGD {
    float momentum, weight_decay, lr;
    bool nesterov;
    void operator()(vf& w, vf& m, vf gradient) const {
        vf g = gradient + w * weight_decay;
        m = m * momentum + g;
        w -= (nesterov ? g + m * momentum : m) * lr;
    }
};

class RowStep {
  public:
    RowStep(const Job& job, int64_t Dp)
        : job(job), Dp(Dp), sgd{job.beta1, job.weight_decay, job.lr, job.nesterov != 0}, w(Dp), first(Dp), second(Dp) {}

    // What `move` will read besides the centre.
    void soon(int64_t row) const {
        for (void* table : job.wide)
            if (table) prefetch_row(table, job.wide_dtype, row, job.D);
    }

    // centre, grad (Dp): the row as it is stored, and d(loss)/d(unit centre), which is overwritten.
    void move(int64_t row, const float* centre, float* grad, Projection projection) {
        job.touched[row] = (int32_t)job.touched_step;
        if (job.optimizer == kSGD && job.centre_dtype == job.wide_dtype && job.D == Dp) {
            if (job.centre_dtype == kBfloat16) return sgd_bf16(row, grad, projection);
            if (job.centre_dtype == kFloat32) return sgd_float(row, grad, projection);
        }
        float* wide[2] = {first, second};
        for (int i = 0; i < 2; i++)
            if (job.wide[i]) read_row(job.wide[i], job.wide_dtype, row, job.D, wide[i]);
        switch (job.optimizer) {
            case kSGD: sgd_row(centre, grad, projection); break;
            case kAdamW: adamw(row, centre, grad, projection); break;
            default: row_adagrad(row, centre, grad, projection);
        }
        int64_t number = job.first_row + row;
        for (int i = 0; i < 2; i++)
            if (job.wide[i])
                write_row(job.wide[i], job.wide_dtype, row, job.D, wide[i], row_key(number, job.wide_key[i]));
        write_row(job.centre, job.centre_dtype, row, job.D, w, row_key(number, job.centre_key));
    }

  private:
    // Where both tables have one dtype and D fills whole vectors: from table to table through registers.
    void sgd_bf16(int64_t row, const float* grad, Projection projection) const {
        uint16_t *centre = (uint16_t*)job.centre + row * job.D, *momentum = (uint16_t*)job.wide[0] + row * job.D;
        int64_t number = job.first_row + row;
        Noise noise_w(row_key(number, job.centre_key)), noise_m(row_key(number, job.wide_key[0]));
        for (int64_t d = 0; d < job.D; d += 2 * LANES) {
            vf to[2], m[2];
            for (int v = 0; v < 2; v++) {
                int64_t at = d + v * LANES;
                to[v] = from_bf16(load<vh>(centre + at));
                m[v] = from_bf16(load<vh>(momentum + at));
                sgd(to[v], m[v], projection(load<vf>(grad + at), to[v]));
            }
            auto [first_w, second_w] = noise_w.next();
            auto [first_m, second_m] = noise_m.next();
            store(centre + d, to_bf16(to[0], to[1], first_w, second_w));
            store(momentum + d, to_bf16(m[0], m[1], first_m, second_m));
        }
    }

    void sgd_float(int64_t row, const float* grad, Projection projection) const {
        float *centre = (float*)job.centre + row * job.D, *momentum = (float*)job.wide[0] + row * job.D;
        for (int64_t d = 0; d < job.D; d += LANES) {
            vf from = load<vf>(centre + d), to = from, m = load<vf>(momentum + d);
            sgd(to, m, projection(load<vf>(grad + d), from));
            store(centre + d, to);
            store(momentum + d, m);
        }
    }

    void sgd_row(const float* centre, const float* grad, Projection projection) {
        for (int64_t d = 0; d < Dp; d += LANES) {
            vf from = load<vf>(centre + d), to = from, m = load<vf>(first + d);
            sgd(to, m, projection(load<vf>(grad + d), from));
            store(w + d, to);
            store(first + d, m);
        }
    }

    void adamw(int64_t row, const float* centre, const float* grad, Projection projection) {
        auto [correct1, correct2] = corrections(job.scalar[0][row] += 1);
        float keep = 1 - job.lr * job.weight_decay;
        for (int64_t d = 0; d < Dp; d += LANES) {
            vf from = load<vf>(centre + d), g = projection(load<vf>(grad + d), from);
            vf m = load<vf>(first + d), v = load<vf>(second + d);
            m += (g - m) * (1 - job.beta1);
            v = v * job.beta2 + g * g * (1 - job.beta2);
            store(first + d, m);
            store(second + d, v);
            store(w + d, from * keep - m * job.lr / ((root(v / correct2) + job.eps) * correct1));
        }
    }

    void row_adagrad(int64_t row, const float* centre, float* grad, Projection projection) {
        float& square_sum = job.scalar[0][row];
        square_sum += form_gradient(centre, grad, projection, job.weight_decay) / job.D;
        float scale = std::sqrt(square_sum) + job.eps;
        float rate = scale == 0 ? 0 : job.lr / scale;  // a row whose gradients were all 0 stays
        for (int64_t d = 0; d < Dp; d += LANES) store(w + d, load<vf>(centre + d) - load<vf>(grad + d) * rate);
    }

    // grad becomes the gradient by the centre, with decay * centre added; returns the sum of its squares.
    float form_gradient(const float* centre, float* grad, Projection projection, float decay) const {
        vf square{};
        for (int64_t d = 0; d < Dp; d += LANES) {
            vf from = load<vf>(centre + d), g = projection(load<vf>(grad + d), from) + from * decay;
            store(grad + d, g);
            square += g * g;
        }
        return add_up(square);
    }

    // 1 - beta ** n: for rows that take part in every step n is always the same.
    std::pair<float, float> corrections(float n) {
        if (n != known_n) {
            known_n = n;
            known = {1 - std::pow((double)job.beta1, n), 1 - std::pow((double)job.beta2, n)};
        }
        return known;
    }

    const Job& job;
    const int64_t Dp;
    const SGD sgd;
    Buffer w, first, second;
    float known_n = -1;
    std::pair<float, float> known;
};

}  // namespace
