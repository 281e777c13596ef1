// The two passes over the centres, for one range of places and one thread.
namespace {

// d(loss)/d(unit centre) -> d(loss)/d(centre): the part across the centre, over its length
struct Projection {
    float part, inverse;
    vf operator()(vf gradient, vf centre) const { return (gradient - centre * part) * inverse; }
};

template <bool BF> class Pass : public Logits<BF> {
    using Base = Logits<BF>;
    using Base::a_word, Base::job, Base::f, Base::chunk, Base::strip, Base::several, Base::at_once, Base::block, Base::rows;
    using Base::row_of_logits, Base::row_of_cache, Base::logit;
    using Base::prepare, Base::operand_of, Base::row_of_operand, Base::inverse_at, Base::form_logits, Base::show, Base::weigh;
    using Base::store_weight, Base::keep_weight, Base::floats_of, Base::inverse_of, Base::targets_between;
    using typename Base::Cached;

  public:
    using Base::row_of;

    Pass(const Job& job, const Features<BF>& features) : Base(job, features) {}

    // Adds the places [begin, end) to denominator (Gp) and weighted_sum (Gp, Dp; may be null), and shows them to nearest (may be null).
    void sums(int64_t begin, int64_t end, double* denominator, float* weighted_sum, Nearest* nearest) {
        Tiles tiles;
        const bool packed = weighted_sum && (BF || several);
        const int64_t words_of_centre = f.Dp / a_word;
        Buffer sum(MEET<BF>), packed_centre(packed ? at_once / chunk * words() * f.Dp : 0);
        Buffer weight(weighted_sum ? MEET<BF> * row_of_weights() : 0);
        for (int64_t from = begin; from < end; from += at_once) {
            const int64_t last = std::min(from + at_once, end);
            auto packed_of = [&](int64_t at) { return packed_centre + (at - from) / chunk * words() * f.Dp; };
            prepare(from, last - from);
            for (int64_t at = from; packed && at < last; at += chunk) pack_centres(at, std::min(chunk, last - at), packed_of(at));
            for (int64_t g = 0; g < f.Gp; g += MEET<BF>)
                for (int64_t at = from; at < last; at += chunk) {
                    const int64_t n = std::min(chunk, last - at), width = std::min(MEET<BF>, f.Gp - g);
                    const float* next = operand_of(at + chunk < last ? at + chunk : from);
                    auto send = [&](int64_t c) {  // for what will be read next, a part for each of the n centres
                        if (several) {
                            if (packed) prefetch_words(packed_of(at) + c * words_of_centre, words_of_centre);
                            prefetch_words(next + c * row_of_operand(), row_of_operand());
                        } else if (!g && at + chunk + c < end) {
                            prefetch_row(job.centre, job.centre_dtype, row_of(at + chunk + c), f.D);
                        }
                    };
                    std::memset(sum, 0, width * 4);
                    form_weights(at, n, g, width, sum, weighted_sum ? (float*)weight : nullptr, nearest, send);
                    for (int64_t i = 0; i < std::min(width, f.G - g); i++) denominator[g + i] += sum[i];
                    if (!weighted_sum) continue;
                    Operand right{operand_of(at), row_of_operand(), Padding<BF>::panel};
                    if (packed) right = {packed_of(at), Padding<BF>::panel, words() * Padding<BF>::panel};
                    const int64_t used = round_up((n + a_word - 1) / a_word, Padding<BF>::words);
                    gemm<BF>(width, f.Dp, used, weight, row_of_weights(), 1, right, weighted_sum + g * f.Dp, f.Dp, true);
                }
        }
        settle_streams();
    }

    // Shows the places [begin, end) to found.
    void nearest(int64_t begin, int64_t end, Nearest& found) {
        Tiles tiles;
        for (int64_t from = begin; from < end; from += at_once) {
            const int64_t last = std::min(from + at_once, end);
            prepare(from, last - from);
            for (int64_t g = 0; g < f.Gp; g += TILE)
                for (int64_t at = from; at < last; at += chunk) {
                    const int64_t n = std::min(chunk, last - at), width = std::min(TILE, f.Gp - g);
                    form_logits(at, n, g, width);
                    show(at, n, g, width, found);
                }
        }
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
            if (!cached) prepare(at, n);
            for (int64_t g = 0; g < f.Gp; g += TILE) {
                const int64_t width = std::min(TILE, f.Gp - g), words = width / a_word;
                const float* weight = BF ? half : logit;
                int64_t weight_row = row_of_logits / a_word;
                if (!cached) {
                    form_logits(at, n, g, width);
                    for (int64_t c = 0; c < n; c++) {
                        Cached* to = (Cached*)(float*)(BF ? half : logit) + c * row_of_logits;
                        weigh(at, c, width, nullptr, [&](int64_t i, vf e) { store_weight(to + i, e); });
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
            for (auto [place, i] : targets_between(at, at + n)) {
                float* to = grad + (place - at) * f.Dp;
                const float* unit = job.unit + i / job.T * f.D;
                for (int64_t d = 0; d < f.D; d++) to[d] += job.target_grad[i] * unit[d];
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
    // A row of the weights of all centres of a chunk with a feature, the left operand of the features' gradient.
    static constexpr int64_t WORDS = std::max<int64_t>(LANES, Padding<BF>::words);
    int64_t words() const { return round_up(chunk / a_word, WORDS); }
    int64_t row_of_weights() const { return words() + GAP; }

    // The weights of n prepared centres with the features from g on, strip by strip: to weight (width, row_of_weights), may be
    // null, and kept; nearest (may be null) is shown the cosines; sum (width) gets what they add up to. send(0), ..., send(n - 1) are called within the products.
    template <class Send>
    void form_weights(int64_t at, int64_t n, int64_t g, int64_t width, float* sum, float* weight, Nearest* nearest, Send send) {
        for (int64_t c = 0; c < n; c += strip) {
            const int64_t here = at + c, m = std::min(strip, n - c);
            form_logits(here, m, g, width, Base::spread(m, pauses<BF>(m, width, f.Kd), [=](int64_t i) { send(c + i); }));
            if (nearest) show(here, m, g, width, *nearest);
            for (int64_t i = 0; i < m; i++) {
                float* product = logit + i * row_of_logits;
                const float inverse = inverse_at(here + i);
                Cached* kept = job.cache && here + i < job.cached_rows ? (Cached*)job.cache + (here + i) * row_of_cache + g : nullptr;
                weigh(here, i, width, sum, [&](int64_t j, vf e) {
                    store(product + j, e * inverse);
                    if (kept) keep_weight(kept + j, e);
                });
            }
            if (weight) turn_over(m, width, weight + c / a_word);
        }
    }

    // m rows of weights in `logit`, one for each centre, -> rows for each feature, of words along the centres.
    void turn_over(int64_t m, int64_t width, float* to) {
        const int64_t ld = row_of_logits;
        for (int64_t c = m; c < round_up(m, WORDS * a_word); c++) std::memset(logit + c * ld, 0, width * 4);
        for (int64_t c = 0; c < round_up(m, WORDS * a_word); c += LANES * a_word)
            for (int64_t g = 0; g < width; g += LANES) {
                vu square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    const float* from = logit + (c + i * a_word) * ld + g;
                    if constexpr (BF) square[i] = pair(to_bf16(load<vf>(from)), to_bf16(load<vf>(from + ld)));
                    else square[i] = load<vu>(from);
                }
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) store(to + (g + i) * row_of_weights() + c / a_word, square[i]);
            }
    }

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

    Projection projection(const float* centre, const float* grad) const {
        vf along[2] = {}, square[2] = {};
        for (int64_t d = 0; d < f.Dp; d += 2 * LANES)
            for (int v = 0; v < 2; v++) {
                int64_t at = d + v * LANES;
                vf g = load<vf>(grad + at), w = load<vf>(centre + at);
                along[v] += g * w;
                square[v] += w * w;
            }
        float inv = inverse_of(add_up(square[0] + square[1]));
        return {add_up(along[0] + along[1]) * inv * inv, inv};
    }

    // n prepared centres -> the right operand of the features' gradient, whose words run along the centres, in panels.
    void pack_centres(int64_t at, int64_t n, float* to) const {
        constexpr int64_t panel = Padding<BF>::panel;
        for (int64_t c = 0; c < n; c += a_word) {
            const float* from = operand_of(at + c);
            for (int64_t d = 0; d < f.Dp; d += LANES) {
                float* word = to + d / panel * panel * words() + c / a_word * panel + d % panel;
                if constexpr (!BF) {
                    store(word, load<vu>(from + d));
                    continue;
                }
                const uint16_t *even = (const uint16_t*)from, *odd = (const uint16_t*)(from + row_of_operand());
                store(word, pair(load<vh>(even + d), c + 1 < n ? load<vh>(odd + d) : vh{}));
            }
        }
    }
};

}  // namespace
