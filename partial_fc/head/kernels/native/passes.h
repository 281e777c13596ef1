// The two passes over the centres, for one range of places and one thread.
#include <vector>

namespace {

// Centres whose products with the features stay in the first caches until they are used up.
constexpr int64_t BLOCK = TILES ? 64 : 48;
// Centres whose weights are summed up to the features' gradient at once: that gradient (G x D) passes through the cache
// once a chunk, so chunks are as long as the second cache allows.
constexpr int64_t CHUNK = 288;

// ---- the features, packed once a call for the products
struct Features {
    int64_t G, Gp, D, Dp, Kd;  // Gp, Dp: padded; Kd: words along D
    Buffer along_d;            // (Kd, Gp): operand of the logits
    Buffer along_g;            // (words along Gp, Dp): operand of the centres' gradients, with the factor in it

    template <bool BF> void pack_for_logits(const Job& job) {
        along_d = Buffer(Kd * Gp);
        for (int64_t g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d++) put<BF>(along_d, d, g, Gp, job.unit[g * D + d]);
    }
    template <bool BF> void pack_for_gradients(const Job& job) {
        along_g = Buffer(Gp / (BF ? 2 : 1) * Dp);
        for (int64_t g = 0; g < G; g++)
            for (int64_t d = 0; d < D; d++) put<BF>(along_g, g, d, Dp, job.unit[g * D + d] * job.factor[g]);
    }
    template <bool BF> static void put(float* to, int64_t k, int64_t n, int64_t stride, float value) {
        if constexpr (BF) {
            vh h = to_bf16(splat(value));
            ((uint16_t*)to)[(k / 2 * stride + n) * 2 + k % 2] = h[0];
        } else {
            to[k * stride + n] = value;
        }
    }
};

// d(loss)/d(unit centre) -> d(loss)/d(centre): the part across the centre, over its length
struct Projection {
    float part, inverse;
    vf operator()(vf gradient, vf centre) const { return (gradient - centre * part) * inverse; }
};

// Whole classes, and whole pairs of centres.
inline int64_t block_of(const Job& job) {
    int64_t k = 2 * job.sub_centres;
    return std::max(k, BLOCK / k * k);
}

template <bool BF> class Pass {
  public:
    Pass(const Job& job, const Features& features)
        : job(job), f(features), block(block_of(job)), rows(round_up(block, Padding<BF>::rows)),
          operand(rows * word_row()), inverse(block), logit(rows * f.Gp), mask(block * f.Gp), masked(block), hard(f.Gp), uniform(f.Dp), row(f.Dp) {
        for (int64_t g = 0; g < f.G; g++)
            if (job.target[g] >= 0) owner.emplace_back(job.target[g], g);
        std::sort(owner.begin(), owner.end());
        if (job.hard) std::memcpy(hard, job.hard, f.G * 4);
        if (job.uniform) std::memcpy(uniform, job.uniform, f.D * 4);
    }

    // Adds the places [begin, end) to denominator (Gp), weighted_sum (Gp, Dp; may be null) and centre_sum (Dp; may be null).
    void sums(int64_t begin, int64_t end, double* denominator, float* weighted_sum, float* centre_sum) {
        Tiles tiles;
        int64_t chunk = std::max(block, CHUNK / block * block), words = round_up(chunk / (BF ? 2 : 1), Padding<BF>::words);
        Buffer sum(f.Gp), weight(words * f.Gp), centre(weighted_sum ? words * f.Dp : 0);
        Buffer across(Padding<BF>::tiles && weighted_sum ? f.Gp * words : 0);
        for (int64_t at = begin; at < end; at += chunk) {
            int64_t n = std::min(chunk, end - at);
            std::memset(sum, 0, f.Gp * 4);
            for (int64_t low = 0; low < n; low += block) {
                int64_t m = std::min(block, n - low);
                form_logits(at + low, m, end);
                for (int64_t c = 0; c < m; c++) {
                    float* product = logit + c * f.Gp;
                    uint16_t* cached = is_cached(at + low, m) ? job.cache + (at + low + c) * f.Gp : nullptr;
                    weigh(at + low, c, sum, [&](int64_t g, vf e) {
                        store(product + g, e * inverse[c]);
                        if (cached) store(cached + g, to_bf16(e));
                    });
                    if (centre_sum) add_unit(row_of(at + low + c), inverse[c], centre_sum);
                }
                if (weighted_sum) keep(m, weight + low / (BF ? 2 : 1) * f.Gp, centre + low / (BF ? 2 : 1) * f.Dp);
            }
            for (int64_t g = 0; g < f.G; g++) denominator[g] += sum[g];
            if (!weighted_sum) continue;
            int64_t used = BF ? (n + 1) / 2 : n;
            if constexpr (Padding<BF>::tiles) {
                int64_t padded = round_up(used, Padding<BF>::words);
                std::memset(weight + used * f.Gp, 0, (padded - used) * f.Gp * 4);
                transpose(weight, padded, f.Gp, across, words);
                gemm<BF>(f.Gp, f.Dp, padded, across, words, 1, centre, f.Dp, weighted_sum, f.Dp, true);
            } else {
                gemm<BF>(f.Gp, f.Dp, used, weight, 1, f.Gp, centre, f.Dp, weighted_sum, f.Dp, true);
            }
        }
    }

    // For each place of [begin, end): take(place, centre (Dp), gradient by the unit centre (Dp), projection): the
    // gradient by the centre is projection(gradient, centre) of each vector along Dp. A block before, soon(place) may
    // send for what take will read.
    template <class Soon, class Take> void gradients(int64_t begin, int64_t end, Soon soon, Take take) {
        Tiles tiles;
        Buffer grad(rows * f.Dp), half(rows * f.Gp / 2);
        for (int64_t at = begin; at < end; at += block) {
            int64_t n = std::min(block, end - at);
            const float* weight = BF ? half : logit;
            bool cached = is_cached(at, n);
            if (cached && Padding<BF>::tiles && n < rows) {  // (cached has no rows to fill tiles with)
                std::memcpy(half, job.cache + at * f.Gp, n * f.Gp * 2);
            } else if (cached) {
                weight = (const float*)(job.cache + at * f.Gp);
            } else {
                form_logits(at, n, end);
                for (int64_t c = 0; c < n; c++) {
                    float* wide = logit + c * f.Gp;
                    uint16_t* narrow = (uint16_t*)(float*)half + c * f.Gp;
                    weigh(at, c, nullptr, [&](int64_t g, vf e) {
                        if constexpr (BF) store(narrow + g, to_bf16(e));
                        else store(wide + g, e);
                    });
                }
            }
            int64_t words = BF ? f.Gp / 2 : f.G, weight_row = BF ? f.Gp / 2 : f.Gp;
            auto ahead = spread(pauses<BF>(n, f.Dp, words), [&](int64_t c) {
                if (c < n) soon(at + c);
                if (c < n && cached) prefetch_row(job.centre, job.centre_dtype, row_of(at + c), f.D);
            });
            gemm<BF>(n, f.Dp, words, weight, weight_row, 1, f.along_g, f.Dp, grad, f.Dp, false, ahead);
            for (auto [place, g] : targets_between(at, at + n)) {
                float* to = grad + (place - at) * f.Dp;
                for (int64_t d = 0; d < f.D; d++) to[d] += job.target_grad[g] * job.unit[g * f.D + d];
            }
            for (int64_t c = 0; c < n; c++) {
                read_row(job.centre, job.centre_dtype, row_of(at + c), f.D, row);
                take(at + c, row, grad + c * f.Dp, projection(grad + c * f.Dp));
            }
        }
    }

    bool is_cached(int64_t at, int64_t n) const { return BF && job.cache && at + n <= job.cached_rows; }
    int64_t row_of(int64_t place) const { return job.row ? job.row[place] : place; }

  private:
    // send(0), ..., send(block - 1), spread over the pauses of a product: what comes from memory meanwhile is asked for
    // little by little, since many requests at once would hold the processor up.
    template <class Send> auto spread(int64_t pauses, Send send) const {
        return [=, next = int64_t(0), each = (block + pauses - 1) / pauses]() mutable {
            for (int64_t last = std::min(next + each, block); next < last; next++) send(next);
        };
    }

    // (a row of the operand of the logits, in words)
    int64_t word_row() const { return BF ? f.Dp / 2 : f.Dp; }

    // logit = the products of n centres from place `at` on with all features; the next block's centres are sent for.
    void form_logits(int64_t at, int64_t n, int64_t end) {
        for (int64_t c = 0; c < n; c++) inverse[c] = inverse_of(fetch(row_of(at + c), operand + c * word_row()));
        auto next = [&](int64_t c) {
            if (at + block + c < end) prefetch_row(job.centre, job.centre_dtype, row_of(at + block + c), f.D);
        };
        auto ahead = spread(pauses<BF>(n, f.Gp, f.Kd), next);
        gemm<BF>(n, f.Gp, f.Kd, operand, word_row(), 1, f.along_d, f.Gp, logit, f.Gp, false, ahead);
        if (BF && job.filter_above < 2.f) settle(at, n);
        find_left_out(at, n);
    }

    void add_unit(int64_t from, float inv, float* centre_sum) {
        read_row(job.centre, job.centre_dtype, from, f.D, row);
        for (int64_t d = 0; d < f.Dp; d += LANES) store(centre_sum + d, load<vf>(centre_sum + d) + load<vf>(row + d) * inv);
    }

    // A row of the table -> operand, and the square of its length.
    float fetch(int64_t from, float* to) {
        vf square[2] = {};
        uint16_t* narrow = (uint16_t*)to;
        if (BF && job.centre_dtype == kBfloat16 && f.D == f.Dp) {
            const uint16_t* w = (const uint16_t*)job.centre + from * f.D;
            for (int64_t d = 0; d < f.D; d += 2 * LANES)
                for (int v = 0; v < 2; v++) {
                    vh h = load<vh>(w + d + v * LANES);
                    store(narrow + d + v * LANES, h);
                    vf x = from_bf16(h);
                    square[v] += x * x;
                }
            return add_up(square[0] + square[1]);
        }
        read_row(job.centre, job.centre_dtype, from, f.D, row);
        for (int64_t d = 0; d < f.Dp; d += 2 * LANES)
            for (int v = 0; v < 2; v++) {
                vf x = load<vf>(row + d + v * LANES);
                if constexpr (BF) store(narrow + d + v * LANES, to_bf16(x));
                else store(to + d + v * LANES, x);
                square[v] += x * x;
            }
        return add_up(square[0] + square[1]);
    }

    // Whether a class is filtered is decided in float32: the products that operands of bfloat16 leave in doubt are formed
    // again. (Each operand is off by 2^-9 of itself at most, a cosine by 2^-8, and the rest is for the rounding of sums.)
    void settle(int64_t at, int64_t n) {
        constexpr float DOUBT = 0x1p-8f + 0x1p-11f;
        for (int64_t c = 0; c < n; c++) {
            float* product = logit + c * f.Gp;
            auto in_doubt = [&](int64_t g) {
                vf distance = load<vf>(product + g) * inverse[c] - job.filter_above;
                return (distance > -DOUBT) & (distance < DOUBT);
            };
            vi any{};
            for (int64_t g = 0; g < f.Gp; g += LANES) any |= in_doubt(g);
            if (std::all_of((int32_t*)&any, (int32_t*)&any + LANES, [](int32_t doubt) { return !doubt; })) continue;
            read_row(job.centre, job.centre_dtype, row_of(at + c), f.D, row);
            for (int64_t g = 0; g < f.Gp; g += LANES) {
                vi doubt = in_doubt(g);
                for (int v = 0; v < LANES && g + v < f.G; v++)
                    if (doubt[v]) product[g + v] = product_of(job.unit + (g + v) * f.D);
            }
        }
    }

    // (of a feature and the centre in `row`)
    float product_of(const float* unit) const {
        vf sum{};
        int64_t d = 0;
        for (; d + LANES <= f.D; d += LANES) sum += load<vf>(unit + d) * load<vf>(row + d);
        float total = add_up(sum);
        for (; d < f.D; d++) total += unit[d] * row[d];
        return total;
    }

    // mask (n, Gp), 0 where a logit is left out, for the rows c with masked[c]: target classes, all but the nearest of a
    // class's centres.
    void find_left_out(int64_t at, int64_t n) {
        int64_t k = job.sub_centres;
        std::memset(masked, 0, block * 4);
        auto touch = [&](int64_t c) {
            if (masked[c] == 0) std::fill_n(mask + c * f.Gp, f.Gp, 1.f);
            masked[c] = 1;
        };
        if (k > 1)
            for (int64_t first = 0; first < n; first += k) {
                for (int64_t c = first; c < first + k; c++) touch(c);
                for (int64_t g = 0; g < f.G; g++) {
                    int64_t best = first;
                    for (int64_t c = first + 1; c < first + k; c++)
                        if (logit[c * f.Gp + g] * inverse[c] > logit[best * f.Gp + g] * inverse[best]) best = c;
                    for (int64_t c = first; c < first + k; c++) mask[c * f.Gp + g] = c == best;
                }
            }
        for (auto [place, g] : targets_between(at, at + n)) {
            int64_t first = place - place % k - at;
            for (int64_t c = first; c < first + k; c++) {
                touch(c);
                mask[c * f.Gp + g] = 0;
            }
        }
    }

    // Products of centre c -> e = exp(logit - shift), added to sum (if any); out(g, e * f') for each vector along Gp.
    template <class Out> void weigh(int64_t at, int64_t c, float* sum, Out out) const {
        const float* product = logit + c * f.Gp;
        float bias = (job.bias ? job.bias[at + c] : 0.f) - job.shift;
        const float* keep = masked[c] != 0 ? mask + c * f.Gp : nullptr;
        bool plain = !job.hard && job.filter_above >= 2.f;
        float scale = plain ? job.scale * inverse[c] : inverse[c];
        for (int64_t g = 0; g < f.Gp; g += LANES) {
            vf x = load<vf>(product + g) * scale, gain = splat(1.f);
            if (!plain) {
                vf cos = x;
                if (job.hard) {
                    vi is_hard = cos > load<vf>(hard + g);
                    x = select(is_hard, cos * (cos + job.hard_t), cos);
                    gain = select(is_hard, cos * 2.f + job.hard_t, gain);
                }
                x = select(cos > job.filter_above, splat(-1e30f), x * job.scale);
            }
            vf e = exp(x + bias);
            if (keep) e *= load<vf>(keep + g);
            if (sum) store(sum + g, load<vf>(sum + g) + e);
            out(g, plain ? e : e * gain);
        }
    }

    // (of the centre in `row`; adds `uniform` to its gradient)
    Projection projection(float* grad) const {
        vf along[2] = {}, square[2] = {};
        for (int64_t d = 0; d < f.Dp; d += 2 * LANES)
            for (int v = 0; v < 2; v++) {
                int64_t at = d + v * LANES;
                vf g = load<vf>(grad + at), w = load<vf>(row + at);
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

    // (NaN where the length is beyond floats: 0 would hide it)
    static float inverse_of(float square) {
        if (!(square < INFINITY)) return NAN;
        return square > 0 ? 1 / std::sqrt(square) : 0;
    }

    // n rows of weights, now in `logit`, and their centres, in `operand`: as operands of the features' gradient, whose
    // words run along the centres.
    void keep(int64_t n, float* weight, float* centre) {
        if constexpr (!BF) {
            std::memcpy(weight, logit, n * f.Gp * 4);
            std::memcpy(centre, operand, n * f.Dp * 4);
            return;
        }
        if (n % 2) {
            std::memset(logit + n * f.Gp, 0, f.Gp * 4);
            std::memset(operand + n * word_row(), 0, word_row() * 4);
        }
        for (int64_t c = 0; c < (n + 1) / 2; c++) {
            interleave_floats(logit + 2 * c * f.Gp, weight + c * f.Gp);
            interleave_halves((uint16_t*)(operand + 2 * c * word_row()), centre + c * f.Dp);
        }
    }

    // (two rows of floats, or of bfloat16, -> one row of pairs of bfloat16)
    void interleave_floats(const float* from, float* to) const {
        for (int64_t g = 0; g < f.Gp; g += LANES) {
            vu low = __builtin_convertvector(to_bf16(load<vf>(from + g)), vu);
            vu high = __builtin_convertvector(to_bf16(load<vf>(from + f.Gp + g)), vu);
            store(to + g, low | (high << 16));
        }
    }

    void interleave_halves(const uint16_t* from, float* to) const {
        for (int64_t d = 0; d < f.Dp; d += LANES) {
            vu low = __builtin_convertvector(load<vh>(from + d), vu);
            vu high = __builtin_convertvector(load<vh>(from + f.Dp + d), vu);
            store(to + d, low | (high << 16));
        }
    }

    struct Range {
        const std::pair<int64_t, int64_t>*first, *last;
        auto begin() const { return first; }
        auto end() const { return last; }
    };
    Range targets_between(int64_t begin, int64_t end) const {
        auto low = std::lower_bound(owner.begin(), owner.end(), std::pair<int64_t, int64_t>(begin, -1));
        auto high = std::lower_bound(low, owner.end(), std::pair<int64_t, int64_t>(end, -1));
        return {owner.data() + (low - owner.begin()), owner.data() + (high - owner.begin())};
    }

    const Job& job;
    const Features& f;
    const int64_t block, rows;  // (rows: those that the products fill)
    std::vector<std::pair<int64_t, int64_t>> owner;  // (place, g), ascending
    Buffer operand, inverse, logit, mask, masked, hard, uniform, row;
};

}  // namespace
