// The features of a call, packed once as the right operands of the products.
namespace {

template <bool BF> struct Features {
    static constexpr int64_t panel = Padding<BF>::panel, a_word = BF ? 2 : 1;
    const int64_t G, Gp, D, Dp, Kd;  // Gp, Dp: padded; Kd: words along D

    // What a pass needs: both operands, if it forms logits and then gradients, or one of them.
    Features(const Job& job, bool to_form_logits, bool to_form_gradients)
        : G(job.G), Gp(round_up(job.G, Padding<BF>::columns)), D(job.D), Dp(round_up(job.D, panel)),
          Kd(round_up((job.D + a_word - 1) / a_word, Padding<BF>::words)), rows(round_up(Kd, LANES)),
          along_d(to_form_logits ? round_up(Gp, panel) * rows : 0, Fill::nothing),
          along_g(to_form_gradients ? Gp / a_word * Dp : 0, Fill::nothing) {
        share(0, Gp, job.threads, 2 * LANES, [&](int, int64_t begin, int64_t end) {
            if (to_form_logits) pack_for_logits(job, begin, end);
            if (to_form_gradients) pack_for_gradients(job, begin, end);
        });
    }

    // From feature g on, a multiple of MEET or TILE: words along D by features, the operand of the logits, ...
    Operand for_logits(int64_t g) const { return {along_d + g * rows, panel, rows * panel}; }
    // ... and words along the features, with the factor in them, by columns: that of the centres' gradients.
    Operand for_gradients(int64_t g) const { return {along_g + g / a_word * panel, panel, Gp / a_word * panel}; }

  private:
    const int64_t rows;
    Buffer along_d, along_g;

    void pack_for_logits(const Job& job, int64_t begin, int64_t end) {
        Buffer some(LANES * rows);
        for (int64_t g = begin; g < end; g += LANES) {
            for (int64_t i = 0; i < LANES; i++) {
                float* to = some + i * rows;
                if (g + i >= G) std::memset(to, 0, rows * 4);
                else if constexpr (BF) narrow(job.unit + (g + i) * D, D, (uint16_t*)to);
                else std::memcpy(to, job.unit + (g + i) * D, D * 4);
            }
            transpose(some, LANES, rows, rows, along_d + g / panel * panel * rows + g % panel, panel);
        }
    }

    void pack_for_gradients(const Job& job, int64_t begin, int64_t end) {
        Buffer even(Dp), odd(Dp);
        auto read = [&](int64_t g, float* to) {
            float factor = g < G ? job.factor[g] : 0.f;
            for (int64_t d = 0; d < D; d++) to[d] = g < G ? job.unit[g * D + d] * factor : 0.f;
        };
        for (int64_t g = begin; g < end; g += a_word) {
            float* to = along_g + g / a_word * panel;
            read(g, even);
            if (BF) read(g + 1, odd);
            for (int64_t d = 0; d < Dp; d += LANES) {
                float* word = to + d / panel * panel * (Gp / a_word) + d % panel;
                if constexpr (BF) store(word, pair(to_bf16(load<vf>(even + d)), to_bf16(load<vf>(odd + d))));
                else store(word, load<vf>(even + d));
            }
        }
    }

    static void narrow(const float* from, int64_t n, uint16_t* to) {
        int64_t d = 0;
        for (; d + LANES <= n; d += LANES) store(to + d, to_bf16(load<vf>(from + d)));
        for (; d < n; d++) to[d] = to_bf16(splat(from[d]))[0];
    }
};

}  // namespace
