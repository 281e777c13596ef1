// The classes with the largest cosines of each feature.
namespace {

// The k largest cosines of each of Gp features with their classes, in falling order; -infinity and -1 where fewer have been shown.
// Of equal ones the first that was shown stays first. NaN counts as infinity, which no cosine is.
class Nearest {
  public:
    Nearest() = default;
    Nearest(int64_t Gp, int64_t k) : k(k), least(Gp, -INFINITY), cosine(Gp * k, -INFINITY), number(Gp * k, -1) {}

    bool empty() const { return least.empty(); }

    // Lanes that are not 0: features from g on whose k largest change with these cosines of another class.
    vi changes(int64_t g, vf cosines) const { return ~(cosines <= load<vf>(least.data() + g)); }

    void take(int64_t g, int64_t class_number, float x) {
        if (std::isnan(x)) x = INFINITY;
        if (x <= least[g]) return;
        float* to = cosine.data() + g * k;
        int64_t *to_number = number.data() + g * k, i = k - 1;
        for (; i > 0 && to[i - 1] < x; i--) to[i] = to[i - 1], to_number[i] = to_number[i - 1];
        to[i] = x, to_number[i] = class_number;
        least[g] = to[k - 1];
    }

    // Those of feature g that another one, of higher classes, has found.
    void take(int64_t g, const Nearest& other) {
        for (int64_t i = g * k; i < (g + 1) * k && other.number[i] >= 0; i++) take(g, other.number[i], other.cosine[i]);
    }

    void write(int64_t g, float* to, int64_t* to_number) const {
        for (int64_t i = 0; i < k; i++) to[i] = cosine[g * k + i] == INFINITY ? NAN : cosine[g * k + i];
        std::memcpy(to_number, number.data() + g * k, k * sizeof *to_number);
    }

  private:
    int64_t k = 0;
    std::vector<float> least, cosine;  // least: the last of the k
    std::vector<int64_t> number;
};

}  // namespace
