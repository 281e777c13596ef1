// A block of logits: the products of some centres with some features, and the exponentials that are made of them.
#include <numeric>
#include <vector>

namespace {

// Centres whose gradients are formed, and which move, at once: with few features so many that they stay in the first cache, else
// more, since all features pass by for each block, and they come from beyond the second cache.
constexpr int64_t BLOCK = TILES ? 64 : 48, LARGE_BLOCK = 288;
// Centres whose weights are summed up to the features' gradient at once.
template <bool BF> constexpr int64_t CHUNK = BF ? 288 : LANES == 16 ? 144 : 96;
// Features that meet a chunk at once: they and their gradient stay in the second cache.
template <bool BF> constexpr int64_t MEET = BF ? 256 : LANES == 16 ? 128 : 96;
// Where there are more features than a TILE, so many chunks are prepared, and all features meet them, before the next ones are:
// the centres, which are fewer bytes, pass through the second cache.
constexpr int64_t CHUNKS = 8;
// Centres whose logits become weights while they are in the first cache: fills the rows of the products and, turned over, their words.
template <bool BF> constexpr int64_t STRIP = Padding<BF>::tiles ? 32 : BF ? 96 : LANES == 16 ? 48 : 24;
// Features that the products take at once, so that their operands stay in the caches whatever G is.
constexpr int64_t TILE = 256;
// Rows that lie a power of two apart would share a few lines of the first cache.
constexpr int64_t GAP = 16;

// The length of a row of Job.cache.
template <bool BF> int64_t cache_row(int64_t G) {
    int64_t Gp = round_up(G, Padding<BF>::columns);
    return Gp > TILE ? Gp + GAP * (BF ? 2 : 1) : Gp;
}

// Whole classes, and whole pairs of centres.
inline int64_t whole_classes(const Job& job, int64_t size) {
    int64_t k = 2 * job.sub_centres;
    return std::max(k, size / k * k);
}

template <bool BF> class Logits {
  public:
    Logits(const Job& job, const Features<BF>& features)
        : job(job), f(features), chunk(whole_classes(job, CHUNK<BF>)), strip(strip_of(job, chunk)),
          several(f.Gp > TILE), at_once(several ? CHUNKS * chunk : chunk), block(whole_classes(job, f.Gp > TILE ? LARGE_BLOCK : BLOCK)),
          rows(round_up(std::max(chunk, block), 32)), row_of_logits(std::min(f.Gp, TILE) + GAP),
          row_of_cache(cache_row<BF>(f.G)), logit(rows * row_of_logits), row(f.Dp),
          inverse(std::max(rows, at_once)), operand(round_up(std::max(rows, at_once), 32) * row_of_operand()),
          mask(rows * row_of_logits), masked(rows) {
        for (int64_t i = 0; i < f.G * job.T; i++)
            if (job.target[i] >= 0) owner.emplace_back(job.target[i], i);
        std::sort(owner.begin(), owner.end());
    }

    int64_t row_of(int64_t place) const { return job.row ? job.row[place] : place; }

  protected:
    static constexpr int64_t a_word = BF ? 2 : 1;
    using Cached = std::conditional_t<BF, uint16_t, float>;

    static void store_weight(Cached* to, vf e) {
        if constexpr (BF) store(to, to_bf16(e));
        else store(to, e);
    }
    static void keep_weight(Cached* to, vf e) {
        if constexpr (BF) stream(to, to_bf16(e));
        else stream(to, e);
    }

    const Job& job;
    const Features<BF>& f;
    const int64_t chunk, strip;
    const bool several;  // chunks are prepared at once
    const int64_t at_once, block, rows, row_of_logits, row_of_cache;  // (rows: those that the products fill)
    Buffer logit, row;  // some centres' logits, and a row of the table as floats

    // send(0), ..., send(n - 1), spread over the pauses of a product: what comes from memory meanwhile is asked for
    // little by little, since many requests at once would hold the processor up.
    template <class Send> static auto spread(int64_t n, int64_t pauses, Send send) {
        return [=, next = int64_t(0), each = (n + pauses - 1) / pauses]() mutable {
            for (int64_t last = std::min(next + each, n); next < last; next++) send(next);
        };
    }

    // logit = the products of n prepared centres from place `at` on with the features from g on. ahead(): see gemm.
    template <class Ahead = Nothing> void form_logits(int64_t at, int64_t n, int64_t g, int64_t width, Ahead ahead = {}) {
        gemm<BF>(n, width, f.Kd, operand_of(at), row_of_operand(), 1, f.for_logits(g), logit, row_of_logits,
                 false, ahead);
        if (BF && job.filter_above < 2.f) settle(at, n, g, width);
        find_left_out(at, n, g, width);
    }

    // Whether a class is filtered is decided in float32: the products that operands of bfloat16 leave in doubt are formed
    // again. (Each operand is off by 2^-9 of itself at most, a cosine by 2^-8, and the rest is for the rounding of sums.)
    void settle(int64_t at, int64_t n, int64_t first_g, int64_t width) {
        constexpr float DOUBT = 0x1p-8f + 0x1p-11f;
        for (int64_t c = 0; c < n; c++) {
            float* product = logit + c * row_of_logits;
            auto in_doubt = [&](int64_t i) {
                vf distance = load<vf>(product + i) * inverse_at(at + c) - job.filter_above;
                return (distance > -DOUBT) & (distance < DOUBT);
            };
            vi any{};
            for (int64_t i = 0; i < width; i += LANES) any |= in_doubt(i);
            if (is_zero(any)) continue;
            read_row(job.centre, job.centre_dtype, row_of(at + c), f.D, row);
            for (int64_t i = 0; i < width; i += LANES) {
                vi doubt = in_doubt(i);
                for (int v = 0; v < LANES && first_g + i + v < f.G; v++)
                    if (doubt[v]) product[i + v] = product_of(job.unit + (first_g + i + v) * f.D);
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

    // Words of a centre.
    int64_t word_row() const { return f.Dp / a_word; }

    int64_t row_of_operand() const { return word_row() + (in_place ? 0 : GAP); }

    // Copies n centres from place `at` on to rows of the products' operand, where they do not lie in the table like that, and finds
    // their lengths.
    void prepare(int64_t at, int64_t n) {
        const bool as_stored = job.centre_dtype == (BF ? kBfloat16 : kFloat32) && f.D == f.Dp;
        prepared = at;
        in_place = BF && !several && as_stored && !job.row && at + round_up(n, Padding<BF>::rows) <= job.S;
        for (int64_t c = 0; c < n; c++) {
            if (several && c + SOON < n) prefetch_row(job.centre, job.centre_dtype, row_of(at + c + SOON), f.D);
            const char* from = (const char*)job.centre + row_of(at + c) * f.D * size_of(job.centre_dtype);
            float* to = operand + c * row_of_operand();
            if (!as_stored) inverse[c] = inverse_of(fetch_row(row_of(at + c), to));
            else if (in_place) inverse[c] = inverse_of(square_of<false>(from, nullptr));
            else inverse[c] = inverse_of(square_of<true>(from, to));
        }
    }
    static constexpr int64_t SOON = 4;

    const float* operand_of(int64_t place) const {
        return (in_place ? (const float*)job.centre + prepared * word_row() : operand) + (place - prepared) * row_of_operand();
    }
    // 1 / the length of a prepared centre.
    float inverse_at(int64_t place) const { return inverse[place - prepared]; }

    // The square of the length of a row of words, which is copied on the way.
    template <bool COPY> float square_of(const char* from, float* to) const {
        vf square[2] = {};
        for (int64_t d = 0; d < word_row(); d += LANES) {
            vf word = load<vf>(from + 4 * d);
            if (COPY) store(to + d, word);
            vf low = BF ? (vf)((vu)word << 16) : word;
            square[0] += low * low;
            if (!BF) continue;
            vf high = (vf)((vu)word & 0xFFFF0000u);
            square[1] += high * high;
        }
        return add_up(square[0] + square[1]);
    }

    // A row of the table -> a row of the operand, and the square of its length.
    float fetch_row(int64_t from, float* to) {
        read_row(job.centre, job.centre_dtype, from, f.D, row);
        vf square[2] = {};
        for (int64_t d = 0; d < f.Dp; d += 2 * LANES)
            for (int v = 0; v < 2; v++) {
                vf x = load<vf>(row + d + v * LANES);
                store_weight((Cached*)to + d + v * LANES, x);
                square[v] += x * x;
            }
        return add_up(square[0] + square[1]);
    }

    // A row of the table as floats, up to Dp of them.
    const float* floats_of(int64_t from) {
        if (job.centre_dtype == kFloat32 && f.D == f.Dp) return (const float*)job.centre + from * f.D;
        read_row(job.centre, job.centre_dtype, from, f.D, row);
        return row;
    }

    // (NaN where the length is beyond floats: 0 would hide it)
    static float inverse_of(float square) {
        if (!(square < INFINITY)) return NAN;
        return square > 0 ? 1 / std::sqrt(square) : 0;
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

    // mask, 0 where a logit is left out, for the rows c with masked[c]: target classes, all but the nearest of a class's
    // centres. Of the logits that are in `logit`.
    void find_left_out(int64_t at, int64_t n, int64_t first_g, int64_t width) {
        const int64_t k = job.sub_centres, ld = row_of_logits;
        std::memset(masked, 0, n * 4);
        auto touch = [&](int64_t c) {
            if (masked[c] == 0) std::fill_n(mask + c * ld, width, 1.f);
            masked[c] = 1;
        };
        if (k > 1)
            for (int64_t first = 0; first < n; first += k) {
                for (int64_t c = first; c < first + k; c++) touch(c);
                for (int64_t g = 0; g < width; g++) {
                    int64_t best = first;
                    for (int64_t c = first + 1; c < first + k; c++)
                        if (logit[c * ld + g] * inverse_at(at + c) > logit[best * ld + g] * inverse_at(at + best)) best = c;
                    for (int64_t c = first; c < first + k; c++) mask[c * ld + g] = c == best;
                }
            }
        for (auto [place, i] : targets_between(at, at + n)) {
            const int64_t g = i / job.T;
            if (g < first_g || g >= first_g + width) continue;
            int64_t first = place - place % k - at;
            for (int64_t c = first; c < first + k; c++) {
                touch(c);
                mask[c * ld + g - first_g] = 0;
            }
        }
    }

    // Products of centre c with `width` features -> e = exp(logit - shift), added to sum (if any); out(i, e) for each vector of
    // them.
    template <class Out> void weigh(int64_t at, int64_t c, int64_t width, float* sum, Out out) const {
        const float* product = logit + c * row_of_logits;
        const float* keep = masked[c] != 0 ? mask + c * row_of_logits : nullptr;
        const bool plain = job.filter_above >= 2.f;
        const float scale = plain ? job.scale * inverse_at(at + c) : inverse_at(at + c);
        if (plain && !keep) {  // nearly always
            for (int64_t i = 0; i < width; i += LANES) {
                vf e = exp(load<vf>(product + i) * scale - job.shift);
                if (sum) store(sum + i, load<vf>(sum + i) + e);
                out(i, e);
            }
            return;
        }
        for (int64_t i = 0; i < width; i += LANES) {
            vf x = load<vf>(product + i) * scale;
            if (!plain) x = select(x > job.filter_above, splat(-1e30f), x * job.scale);
            vf e = exp(x - job.shift);
            if (keep) e *= load<vf>(keep + i);
            if (sum) store(sum + i, load<vf>(sum + i) + e);
            out(i, e);
        }
    }

    // Shows the cosines of n prepared centres from place `at` on, whole classes, whose products with the features from g on are in
    // `logit`. A class is as near as the nearest of its centres.
    void show(int64_t at, int64_t n, int64_t first_g, int64_t width, Nearest& nearest) const {
        const int64_t k = job.sub_centres;
        auto cosines = [&](int64_t c, int64_t i) {
            vf most = load<vf>(logit + c * row_of_logits + i) * inverse_at(at + c);
            for (int64_t other = c + 1; other < c + k; other++) {
                vf x = load<vf>(logit + other * row_of_logits + i) * inverse_at(at + other);
                most = select((x > most) | (x != x), x, most);
            }
            return most;
        };
        for (int64_t c = 0; c < n; c += k) {
            vi any{};
            for (int64_t i = 0; i < width; i += LANES) any |= nearest.changes(first_g + i, cosines(c, i));
            if (is_zero(any)) continue;
            for (int64_t i = 0; i < width; i += LANES) {
                const vf cos = cosines(c, i);
                if (is_zero(nearest.changes(first_g + i, cos))) continue;
                for (int v = 0; v < LANES; v++) nearest.take(first_g + i + v, (at + c) / k, cos[v]);
            }
        }
    }

  private:
    // Whole classes, and whole words of LANES centres; where few classes do not fill those, all of the chunk.
    static int64_t strip_of(const Job& job, int64_t chunk) {
        const int64_t size = std::lcm(STRIP<BF>, (int64_t)job.sub_centres);
        return size < chunk ? size : chunk;
    }

    std::vector<std::pair<int64_t, int64_t>> owner;  // (place, number of the target), ascending
    int64_t prepared = 0;  // the first place of those that are prepared
    bool in_place = false;
    Buffer inverse, operand, mask, masked;
};

}  // namespace
