// What Python hands over: sizes, pointers, and where the results go. library.py makes its structs of the lists of fields below.
#pragma once
#include <cstdint>

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct Job {
    // the logits: G features of width D against S of the centres
    int64_t G, D, S;
    int64_t T;               // labels of a feature
    const float* unit;       // (G, D), length 1 or 0
    void* centre;            // (L, D) of centre_dtype
    const int64_t* row;      // (S): rows of centre, ascending; null: all
    const int64_t* target;   // (G, T): position of the target centre among the S, or -1; no class twice in a row
    float scale, shift;      // exp(logit - shift) is what is added up
    float filter_above;      // infinity: nothing is filtered
    int32_t sub_centres;
    int32_t centre_dtype;
    int32_t low_precision;   // 1: operands of the products are bfloat16
    int32_t threads;

    // results of sums
    double* denominator;     // (G): sum of exp(logit - shift)
    float* weighted_sum;     // (G, D): sum of exp(logit - shift) * unit centre, or null

    // results of nearest, and of sums where num_nearest is not 0: for each feature the classes (positions / sub_centres) with the
    // largest cosines, falling, targets too; -infinity and -1 where there are fewer
    int64_t num_nearest;
    float* nearest_cos;      // (G, num_nearest)
    int64_t* nearest_class;  // (G, num_nearest)

    // exp(logit - shift) of the first cached_rows positions in the operands' dtype, (cached_rows, head_cache_row(G)), or null:
    // written by sums, read by gradients and update, which then do not form those logits again.
    void* cache;
    int64_t cached_rows;

    // the gradient by the logits, for gradients and update
    const float* factor;     // (G): times exp(logit - shift) it is d(loss)/d(cosine)
    const float* target_grad;  // (G, T)

    // gradients: of positions [begin, end), into grad (end - begin, D)
    int64_t begin, end;
    float* grad;

    // update: the step of an optimizer of rows/optimizers.py; noise keys as in counter_rng.py, `rounding_noise`
    int32_t optimizer;
    int32_t nesterov;        // of kSGD
    void* wide[2];           // (L, D) of wide_dtype: kSGD: momentum; kAdamW: both moments
    float* scalar[2];        // (L): kAdamW: number of steps; kRowAdagrad: sum of squares
    int32_t wide_dtype;
    uint32_t centre_key;
    uint32_t wide_key[2];
    float lr, weight_decay, eps;
    float beta1, beta2;      // beta1 of kSGD: momentum
    int32_t* touched;        // (L): becomes touched_step where a row is moved
    int64_t touched_step;
    int64_t first_row;       // the number of row 0 among all rows of all ranks

    // catch_up (rows/catch_up.py): brings S rows of these tables to touched_step, as far as the closed form of the optimizer goes
    const int64_t* number;   // (S): their numbers for the noise, before first_row is added; null: row, or else 0 to S - 1
    const double* sums;      // what the steps from `first_step` on add up to: a few numbers for each, sums_stride apart
    int64_t sums_stride, first_step;
    int64_t least_step;      // kAdamW: the first step from which it holds
    double fade1, fade2;     // kAdamW: both betas
    int64_t* left;           // how many rows were left as they are
};

enum Optimizer : int32_t { kSGD = 0, kAdamW = 1, kRowAdagrad = 2 };

// For the functions of rows.h.
struct RowJob {
    int64_t G, D, S;
    int64_t T;               // labels of a row
    const int64_t* label;    // (G, T): class numbers of all ranks
    int64_t start, num_local;  // the classes of this rank
    const int64_t* active;   // (S): the active local rows, ascending; null: all
    const int64_t* row;      // (S): where they are in the table; null: in this order
    const void* table;       // centres, (L, D) of table_dtype
    const char* feat;        // (G, D) of feat_dtype, a row feat_stride bytes after the other
    int64_t feat_stride;
    int32_t table_dtype, feat_dtype, sub_centres, threads;

    // targets writes, gradients reads:
    float* unit;             // (G, D): features of length 1
    float* norm;             // (G): their former lengths
    int64_t* position;       // (G, T): of the nearest target centre among the S, or -1
    // targets writes:
    float* cos;              // (G, T): with that centre; 0 where there is none
    bool* elsewhere;         // (G, T): another rank has the class

    // gradients: sum (G, D) becomes d(loss)/d(features)
    float* sum;
    const float* weight;     // (G): times sum it is what the negatives give
    const float* target_grad;  // (G, T)
};

#define FIELDS_OF_JOB(F) \
    F(G) F(D) F(S) F(T) F(unit) F(centre) F(row) F(target) F(scale) F(shift) F(filter_above) F(sub_centres) F(centre_dtype) \
    F(low_precision) F(threads) F(denominator) F(weighted_sum) F(num_nearest) F(nearest_cos) F(nearest_class) F(cache) \
    F(cached_rows) F(factor) F(target_grad) F(begin) F(end) F(grad) F(optimizer) F(nesterov) F(wide) F(scalar) F(wide_dtype) \
    F(centre_key) F(wide_key) F(lr) F(weight_decay) F(eps) F(beta1) F(beta2) F(touched) F(touched_step) F(first_row) \
    F(number) F(sums) F(sums_stride) F(first_step) F(least_step) F(fade1) F(fade2) F(left)
#define FIELDS_OF_ROW_JOB(F) \
    F(G) F(D) F(S) F(T) F(label) F(start) F(num_local) F(active) F(row) F(table) F(feat) F(feat_stride) F(table_dtype) F(feat_dtype) \
    F(sub_centres) F(threads) F(unit) F(norm) F(position) F(cos) F(elsewhere) F(sum) F(weight) F(target_grad)
