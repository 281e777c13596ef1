// The two passes over the centres, for one range of places and one thread.
namespace {

// d(loss)/d(unit centre) -> d(loss)/d(centre): the part across the centre, over its length
struct Projection {
    float part, inverse;
    vf operator()(vf gradient, vf centre) const { return (gradient - centre * part) * inverse; }
};

template <bool BF> class Pass : public Logits<BF> {
    using Base = Logits<BF>;
    using Base::a_word, Base::job, Base::f, Base::chunk, Base::block, Base::rows, Base::row_of_logits, Base::row_of_cache;
    using Base::inverse, Base::logit, Base::row;
    using Base::fetch, Base::form_logits, Base::weigh, Base::store_weight, Base::keep_weight, Base::floats_of, Base::word_row, Base::row_of_operand;
    using Base::inverse_of, Base::targets_between;
    using typename Base::Cached;

  public:
    using Base::row_of;

    Pass(const Job& job, const Features<BF>& features) : Base(job, features), uniform(f.Dp) {
        if (job.uniform) std::memcpy(uniform, job.uniform, f.D * 4);
    }

    // Adds the places [begin, end) to denominator (Gp), weighted_sum (Gp, Dp; may be null) and centre_sum (Dp; may be null).
    void sums(int64_t begin, int64_t end, double* denominator, float* weighted_sum, float* centre_sum) {
        Tiles tiles;
        const int64_t words = round_up(chunk / a_word, Padding<BF>::words), at_once = features_at_once<BF>(f.Gp);
        Buffer sum(f.Gp), pairs(BF && weighted_sum ? words * f.Dp : 0), weight(BF ? words * row_of_logits : 0);
        Buffer across(Padding<BF>::tiles && weighted_sum ? round_up(TILE, 32) * (words + GAP) : 0);
        auto meet = [&](int64_t at, int64_t first, int64_t last) {  // some centres and some features
            const int64_t n = std::min(chunk, end - at), used = (n + a_word - 1) / a_word;
            const float* centre = fetch(at, n);
            Operand right{centre, row_of_operand(), Padding<BF>::panel};
            if (BF && weighted_sum) right = interleave_centres(centre, n, words, pairs);
            if (centre_sum && !first)
                for (int64_t c = 0; c < n; c++) add_unit(row_of(at + c), inverse[c], centre_sum);
            std::memset(sum + first, 0, (last - first) * 4);
            for (int64_t g = first; g < last; g += TILE) {
                const int64_t width = std::min(TILE, last - g);
                form_logits(at, n, g, width, centre, g > first ? at + n : std::min(at + 2 * chunk, end));
                for (int64_t c = 0; c < n; c++) {
                    float* product = logit + c * row_of_logits;
                    Cached* kept = job.cache && at + c < job.cached_rows ? (Cached*)job.cache + (at + c) * row_of_cache + g : nullptr;
                    weigh(at, c, g, width, sum, [&](int64_t i, vf e) {
                        store(product + i, e * inverse[c]);
                        if (kept) keep_weight(kept + i, e);
                    });
                }
                if (!weighted_sum) continue;
                float* to = weighted_sum + g * f.Dp;
                if constexpr (!BF) {
                    gemm<BF>(width, f.Dp, n, logit, 1, row_of_logits, right, to, f.Dp, true);
                    continue;
                }
                interleave_weights(n, width, weight);
                if constexpr (Padding<BF>::tiles) {
                    const int64_t padded = round_up(used, Padding<BF>::words);
                    for (int64_t c = used; c < padded; c++) std::memset(weight + c * row_of_logits, 0, width * 4);
                    transpose(weight, padded, width, row_of_logits, across, words + GAP);
                    gemm<BF>(width, f.Dp, padded, across, words + GAP, 1, right, to, f.Dp, true);
                } else {
                    gemm<BF>(width, f.Dp, used, weight, 1, row_of_logits, right, to, f.Dp, true);
                }
            }
            for (int64_t g = first; g < std::min(last, f.G); g++) denominator[g] += sum[g];
        };
        for (int64_t first = 0; first < f.Gp; first += at_once)
            for (int64_t at = begin; at < end; at += chunk) meet(at, first, std::min(first + at_once, f.Gp));
        settle_streams();
    }

    // For each place of [begin, end): take(place, centre (Dp), gradient by the unit centre (Dp), projection): the
    // gradient by the centre is projection(gradient, centre) of each vector along Dp. Before, soon(place) may send for what
    // take will read.
    template <class Soon, class Take> void gradients(int64_t begin, int64_t end, Soon soon, Take take) {
        Tiles tiles;
        Buffer grad(rows * f.Dp), half(BF ? rows * row_of_logits / 2 : 0);
        for (int64_t at = begin; at < end; at += block) {
            const int64_t n = std::min(block, end - at);
            const bool cached = job.cache && at + n <= job.cached_rows;
            const float* centre = cached ? nullptr : fetch(at, n);
            for (int64_t g = 0; g < f.Gp; g += TILE) {
                const int64_t width = std::min(TILE, f.Gp - g), words = width / a_word;
                const float* weight = BF ? half : logit;
                int64_t weight_row = row_of_logits / a_word;
                if (!cached) {
                    form_logits(at, n, g, width, centre, at + n);
                    for (int64_t c = 0; c < n; c++) {
                        Cached* to = (Cached*)(float*)(BF ? half : logit) + c * row_of_logits;
                        weigh(at, c, g, width, nullptr, [&](int64_t i, vf e) { store_weight(to + i, e); });
                    }
                } else if (n < round_up(n, Padding<BF>::rows)) {  // (the cache has no rows to fill tiles with)
                    for (int64_t c = 0; c < n; c++)
                        std::memcpy(half + c * weight_row, (Cached*)job.cache + (at + c) * row_of_cache + g, words * 4);
                } else {
                    weight = (const float*)((Cached*)job.cache + at * row_of_cache + g);
                    weight_row = row_of_cache / a_word;
                }
                gemm<BF>(n, f.Dp, words, weight, weight_row, 1, f.for_gradients(g), grad, f.Dp, g > 0, kept_after(at, n, g, end));
            }
            for (auto [place, g] : targets_between(at, at + n)) {
                float* to = grad + (place - at) * f.Dp;
                for (int64_t d = 0; d < f.D; d++) to[d] += job.target_grad[g] * job.unit[g * f.D + d];
            }
            for (int64_t c = 0; c < n; c++) {
                if (at + block + c < end) {  // while this row moves, the one a block later comes
                    prefetch_row(job.centre, job.centre_dtype, row_of(at + block + c), f.D);
                    soon(at + block + c);
                    if (f.Gp <= TILE && at + block + c < job.cached_rows)
                        prefetch_row(job.cache, BF ? kBfloat16 : kFloat32, at + block + c, row_of_cache);
                }
                const float* from = floats_of(row_of(at + c));
                take(at + c, from, grad + c * f.Dp, projection(from, grad + c * f.Dp));
            }
        }
    }

  private:
    // Sends for the kept exponentials that the product after the one of n centres from `at` on with the features from g on will
    // read, while that one is formed. (Where one product takes all features there is time for it between blocks.)
    auto kept_after(int64_t at, int64_t n, int64_t g, int64_t end) const {
        const bool same_centres = g + TILE < f.Gp;
        const int64_t next = same_centres ? at : at + block, from = same_centres ? g + TILE : 0, width = std::min(TILE, f.Gp - from);
        const int64_t kept = f.Gp <= TILE || !job.cache ? 0 : std::min({n, end - next, job.cached_rows - next});
        return Base::spread(std::max<int64_t>(0, kept), pauses<BF>(n, f.Dp, std::min(TILE, f.Gp - g) / a_word), [=](int64_t c) {
            const char* row = (const char*)((Cached*)job.cache + (next + c) * row_of_cache + from);
            for (int64_t byte = 0; byte < width * (int64_t)sizeof(Cached); byte += 64) __builtin_prefetch(row + byte, 0, 2);
        });
    }

    void add_unit(int64_t from, float inv, float* centre_sum) {
        read_row(job.centre, job.centre_dtype, from, f.D, row);
        for (int64_t d = 0; d < f.Dp; d += LANES) store(centre_sum + d, load<vf>(centre_sum + d) + load<vf>(row + d) * inv);
    }

    // (of a centre; adds `uniform` to its gradient)
    Projection projection(const float* centre, float* grad) const {
        vf along[2] = {}, square[2] = {};
        for (int64_t d = 0; d < f.Dp; d += 2 * LANES)
            for (int v = 0; v < 2; v++) {
                int64_t at = d + v * LANES;
                vf g = load<vf>(grad + at), w = load<vf>(centre + at);
                if (job.uniform) {
                    g += load<vf>(uniform + at);
                    store(grad + at, g);
                }
                along[v] += g * w;
                square[v] += w * w;
            }
        float inv = inverse_of(add_up(square[0] + square[1]));
        return {add_up(along[0] + along[1]) * inv * inv, inv};
    }

    // n rows of bfloat16 centres -> the operand of the features' gradient, whose words run along the centres.
    Operand interleave_centres(const float* centre, int64_t n, int64_t words, float* to) const {
        constexpr int64_t panel = Padding<BF>::panel;
        for (int64_t c = 0; c < n; c += 2) {
            const uint16_t *even = (const uint16_t*)(centre + c * word_row()), *odd = even + f.Dp;
            for (int64_t d = 0; d < f.Dp; d += LANES) {
                vh high = c + 1 < n ? load<vh>(odd + d) : vh{};
                store(to + d / panel * panel * words + c / 2 * panel + d % panel, pair(load<vh>(even + d), high));
            }
        }
        return {to, panel, words * panel};
    }

    // n rows of weights, now in `logit` -> pairs of bfloat16.
    void interleave_weights(int64_t n, int64_t width, float* to) {
        if (n % 2) std::memset(logit + n * row_of_logits, 0, width * 4);
        for (int64_t c = 0; c < n; c += 2, to += row_of_logits)
            for (int64_t i = 0; i < width; i += LANES) {
                const float* from = logit + c * row_of_logits + i;
                store(to + i, pair(to_bf16(load<vf>(from)), to_bf16(load<vf>(from + row_of_logits))));
            }
    }

    Buffer uniform;
};

}  // namespace
