/* The next token of a sequence: equivalent to `engine.sampling.choose`, which has the rules.
 *
 * Scores are float64 with penalties, else the float32 logits; weights are float64. */
#include "common.h"

/* `penalties`: whether there are any. The other numbers are those of `Sampling`. */
struct sampling {
    int64_t penalties, greedy, top_k;
    double temperature, top_p, min_p, repetition, presence, frequency;
};

struct token {
    double score;
    int64_t id;
};

/* Whether a comes before b: the better score, of equals the lower id. */
INLINE int before(struct token a, struct token b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

/* Restore the heap (worst token first) below index `i`. */
static void sink(struct token *heap, int64_t count, int64_t i) {
    struct token moved = heap[i];
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && before(heap[child], heap[child + 1])) child++;
        if (!before(moved, heap[child])) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

#define LANES 32 /* numbers at a time, vectorized if possible */

/* For scores of TYPE: the largest (NaN if any is), and the k best, best first. */
#define LOOK(type, level, target)                                                                  \
    target static double greatest_##type##level(const type *x, int64_t count) {                    \
        type most[LANES];                                                                          \
        int32_t odd[LANES] = {0}, any = 0;                                                         \
        for (int j = 0; j < LANES; j++) most[j] = -INFINITY;                                       \
        int64_t i = 0;                                                                             \
        for (; i + LANES <= count; i += LANES)                                                     \
            for (int j = 0; j < LANES; j++) {                                                      \
                odd[j] |= x[i + j] != x[i + j];                                                    \
                most[j] = x[i + j] > most[j] ? x[i + j] : most[j];                                 \
            }                                                                                      \
        for (; i < count; i++) {                                                                   \
            any |= x[i] != x[i];                                                                   \
            most[0] = x[i] > most[0] ? x[i] : most[0];                                             \
        }                                                                                          \
        for (int j = 0; j < LANES; j++) any |= odd[j];                                             \
        for (int j = 1; j < LANES; j++) most[0] = most[j] > most[0] ? most[j] : most[0];           \
        return any ? (double)NAN : (double)most[0];                                                \
    }                                                                                              \
    target static void best_of_##type##level(const type *x, int64_t count, int64_t k,              \
                                             struct token *heap) {                                 \
        for (int64_t i = 0; i < k; i++) heap[i] = (struct token){x[i], i};                         \
        for (int64_t i = k / 2; i-- > 0;) sink(heap, k, i);                                        \
        for (int64_t i = k; i < count;) {                                                          \
            type least = (type)heap[0].score;                                                      \
            int64_t end = i + LANES < count ? i + LANES : count;                                   \
            int32_t above = 0;                                                                     \
            if (end - i == LANES)                                                                  \
                for (int j = 0; j < LANES; j++) above |= x[i + j] > least;                         \
            else                                                                                   \
                above = 1;                                                                         \
            for (; above && i < end; i++)                                                          \
                if (x[i] > heap[0].score) { /* the lower id of equals is already in */          \
                    heap[0] = (struct token){x[i], i};                                             \
                    sink(heap, k, 0);                                                              \
                }                                                                                  \
            i = end;                                                                               \
        }                                                                                          \
        for (int64_t end = k; end-- > 1;) {                                                        \
            struct token worst = heap[0];                                                          \
            heap[0] = heap[end];                                                                   \
            sink(heap, end, 0);                                                                    \
            heap[end] = worst;                                                                     \
        }                                                                                          \
    }
LOOK(float, _portable, )
LOOK(double, _portable, )
#ifdef X86
LOOK(float, _avx2, WITH_AVX2)
LOOK(double, _avx2, WITH_AVX2)
LOOK(float, _avx512, WITH_AVX512)
LOOK(double, _avx512, WITH_AVX512)
#define AT_LEVEL(name)                                                                             \
    (level >= AVX512 ? name##_avx512 : level >= AVX2 ? name##_avx2 : name##_portable)
#else
#define AT_LEVEL(name) name##_portable
#endif

/* e^x for x of at most 0, within 2 units in the last place; 0 below -708. x = n log 2 + r, and e^r
 * is a Taylor series with a next term of 4e-18. Loops over it are vectorized. */
INLINE double exponential(double x) {
    static const double coefficients[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
        1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0,
    };
    double y = x > -708.0 ? x : -708.0;
    double n = y * 1.4426950408889634 + 6755399441055744.0; /* an integer in the lowest bits */
    uint64_t power; /* shifted out of its sign */
    memcpy(&power, &n, sizeof power);
    n -= 6755399441055744.0;
    double r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10, e = 0;
    for (int i = 0; i < 14; i++) e = e * r + coefficients[i];
    uint64_t bits;
    memcpy(&bits, &e, sizeof bits);
    bits += power << 52;
    memcpy(&e, &bits, sizeof e);
    return x > -708.0 ? e : 0.0;
}

#define WEIGH(name, target)                                                                        \
    target static void name(const double *scores, int64_t count, double most, double by,           \
                            double *out) {                                                         \
        for (int64_t i = 0; i < count; i++) out[i] = exponential((scores[i] - most) / by);         \
    }
WEIGH(weigh_portable, ) /* e^((score - most) / by) of each; `most` is the largest */
#ifdef X86
WEIGH(weigh_avx2, WITH_AVX2)
WEIGH(weigh_avx512, WITH_AVX512)
#endif

/* In the same order at every level. */
static double sum_of(const double *x, int64_t count) {
    double sums[8] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += x[i + j];
    for (; i < count; i++) total += x[i];
    for (int j = 0; j < 8; j++) total += sums[j];
    return total;
}

static double penalized(double score, int64_t prompt, int64_t output, const struct sampling *s) {
    if (s->repetition != 1 && (prompt > 0 || output > 0))
        score = score > 0 ? score / s->repetition : score * s->repetition;
    return score - s->presence * (output > 1 ? 1 : (double)output) - s->frequency * (double)output;
}

static int by_rank(const void *a, const void *b) {
    const struct token *x = a, *y = b;
    return before(*x, *y) ? -1 : before(*y, *x);
}

/* Number of tokens with at least this weight (the largest is 1). */
static int64_t at_least(double least, const double *scores, const double *weights, int64_t vocab,
                        struct token *tokens) {
    int64_t count = 0;
    for (int64_t i = 0; i < vocab; i++) {
        tokens[count] = (struct token){scores[i], i};
        count += !(weights[i] < least);
    }
    return count;
}

static int by_id(const void *a, const void *b) {
    int64_t x = ((const struct token *)a)->id, y = ((const struct token *)b)->id;
    return x < y ? -1 : x > y;
}

/* For tokens in descending order with weights as scores: top-p and min-p, then the draw by id. */
static int64_t drawn(struct token *tokens, int64_t count, double enough, const struct sampling *s,
                     double u) {
    double sum = 0, total = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; sum += tokens[i++].score)
        if ((s->top_p >= 1 || i == 0 || sum < enough) && !(tokens[i].score < s->min_p))
            tokens[kept++] = tokens[i];
    int in_order = 1;
    for (int64_t i = 1; i < kept; i++) in_order &= tokens[i - 1].id < tokens[i].id;
    if (!in_order) qsort(tokens, (size_t)kept, sizeof *tokens, by_id);
    for (int64_t i = 0; i < kept; i++) total += tokens[i].score;
    sum = 0;
    for (int64_t i = 0; i < kept; i++) {
        sum += tokens[i].score;
        if (sum > u * total && tokens[i].score > 0) return tokens[i].id;
    }
    return 0;
}

/* The token and the best score of a row of `vocab` logits; the score is not finite if there is NaN,
 * +inf, or only -inf, and the token is then 0. Counts may be NULL, `u` is in [0, 1). `room` is for
 * 2 * vocab numbers and as many tokens. */
int64_t llmcli_choose(const float *logits, int64_t vocab, const struct sampling *s,
                      const int64_t *prompt, const int64_t *output, double u, double *best,
                      double *room, int64_t level) {
    double *scores = room, *weights = room + vocab, most;
    struct token *tokens = (struct token *)(room + 2 * vocab);
    const int narrow = !s->penalties;
    (void)level;
    if (s->penalties)
        for (int64_t i = 0; i < vocab; i++) {
            int64_t of_prompt = prompt ? prompt[i] : 0, of_output = output ? output[i] : 0;
            scores[i] = of_prompt || of_output ? penalized(logits[i], of_prompt, of_output, s)
                                               : (double)logits[i];
        }
    most = narrow ? AT_LEVEL(greatest_float)(logits, vocab)
                  : AT_LEVEL(greatest_double)(scores, vocab);
    *best = most;
    if (most != most) return 0;
    if (s->greedy || !(most < INFINITY) || !(most > -INFINITY)) {
        int64_t first = 0;
        while (first < vocab - 1 && (narrow ? (double)logits[first] : scores[first]) != most) first++;
        return first;
    }
    if (s->top_k > 0 && s->top_k < vocab) {
        double enough = 0;
        if (narrow)
            AT_LEVEL(best_of_float)(logits, vocab, s->top_k, tokens);
        else
            AT_LEVEL(best_of_double)(scores, vocab, s->top_k, tokens);
        for (int64_t i = 0; i < s->top_k; i++) {
            tokens[i].score = exponential((tokens[i].score - most) / s->temperature);
            enough += tokens[i].score;
        }
        return drawn(tokens, s->top_k, s->top_p * enough, s, u);
    }
    if (narrow)
        for (int64_t i = 0; i < vocab; i++) scores[i] = logits[i];
    AT_LEVEL(weigh)(scores, vocab, most, s->temperature, weights);
    double total = sum_of(weights, vocab);
    int64_t count;
    if (s->top_p < 1) { /* sort only tokens with larger weights, if these are enough */
        for (double least = 1e-2, held = 0;; least = least > 1e-12 ? least * 1e-2 : 0, held = 0) {
            least = least < s->min_p ? s->min_p : least;
            count = at_least(least, scores, weights, vocab, tokens);
            for (int64_t i = 0; i < count; i++) held += weights[tokens[i].id];
            if (least <= s->min_p || held > s->top_p * total) break;
        }
        qsort(tokens, (size_t)count, sizeof *tokens, by_rank);
    } else {
        count = at_least(s->min_p, scores, weights, vocab, tokens);
    }
    for (int64_t i = 0; i < count; i++) tokens[i].score = weights[tokens[i].id];
    return drawn(tokens, count, s->top_p * total, s, u);
}
