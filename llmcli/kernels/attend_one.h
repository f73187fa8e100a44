/* ATTEND in vectors of WIDTH floats: see each_width.h.
 *
 * A score is summed in 16 lanes, lane j taking numbers j, j + 16, …; lanes are then added in pairs,
 * 4 slots at a time: the same bits for every WIDTH.
 */
#define SHARE (16 / WIDTH) /* vectors of 16 lanes */

typedef float NAMED(floats) __attribute__((vector_size(4 * WIDTH)));
typedef int32_t NAMED(numbers) __attribute__((vector_size(4 * WIDTH)));
EXPONENTIALS(TARGET, NAMED(exponentials), NAMED(floats), NAMED(numbers))
SOFT_CAPS(TARGET, NAMED(capped), NAMED(exponentials), NAMED(floats), NAMED(numbers))

#define floats NAMED(floats)
#define numbers NAMED(numbers)

TARGET INLINE floats NAMED(at)(const float *from) {
    floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

/* Load WIDTH numbers of the cache. */
TARGET INLINE floats NAMED(cached)(const void *rows, int64_t at, const int kind) {
    if (kind == FLOATS) return NAMED(at)((const float *)rows + at);
    return kind == BFLOATS ? (floats)WIDENED((const uint16_t *)rows + at)
                           : (floats)HALVES((const uint16_t *)rows + at);
}

/* Sums of 4 times 16 lanes, added as j + 8, j + 4, j + 2, j + 1. */
TARGET INLINE quad NAMED(folded)(floats lanes[4][SHARE]) {
#if WIDTH == 16
    floats pairs[2], all;
    UNROLL for (int i = 0; i < 2; i++)
        pairs[i] = _mm512_shuffle_f32x4(lanes[2 * i][0], lanes[2 * i + 1][0], 0x44) +
                   _mm512_shuffle_f32x4(lanes[2 * i][0], lanes[2 * i + 1][0], 0xee);
    all = _mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88) +
          _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd);
    all += _mm512_permute_ps(all, 0x4e);
    all += _mm512_permute_ps(all, 0xb1);
    return (quad)_mm512_castps512_ps128(
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), all));
#else
    quad f[4];
    UNROLL for (int i = 0; i < 4; i++) {
        quad four[4];
        memcpy(four, lanes[i], sizeof four);
        f[i] = (four[0] + four[2]) + (four[1] + four[3]);
    }
    quad a = __builtin_shufflevector(f[0], f[1], 0, 1, 4, 5) +
             __builtin_shufflevector(f[0], f[1], 2, 3, 6, 7);
    quad b = __builtin_shufflevector(f[2], f[3], 0, 1, 4, 5) +
             __builtin_shufflevector(f[2], f[3], 2, 3, 6, 7);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/* Scores of G queries (a compile-time constant) with slots s to s + 3; beyond the last slot it is
 * repeated. */
TARGET INLINE void NAMED(score)(const int G, const int kind, const struct op *op, const float *q,
                                const void *k, int64_t s, int64_t slots,
                                float (*scores)[SLOTS]) {
    const int together = WIDTH == 16 ? 4 : G > 2 ? 1 : 2; /* as registers allow */
    const int64_t size = op->arg[10];
    const float scale = number(op->arg[12]);
    floats sums[MOST_QUERIES][4][SHARE];
    UNROLL for (int first = 0; first < 4; first += together) {
        int64_t rows[4];
        UNROLL for (int t = first; t < first + together; t++) {
            rows[t] = (s + t < slots ? s + t : slots - 1) * size;
            UNROLL for (int g = 0; g < G; g++)
                UNROLL for (int h = 0; h < SHARE; h++) sums[g][t][h] = (floats){0};
        }
        for (int64_t i = 0; i < size; i += 16)
            UNROLL for (int t = first; t < first + together; t++)
                UNROLL for (int h = 0; h < SHARE; h++) {
                    const floats key = NAMED(cached)(k, rows[t] + i + h * WIDTH, kind);
                    UNROLL for (int g = 0; g < G; g++)
                        sums[g][t][h] = FUSED(NAMED(at)(q + g * size + i + h * WIDTH), key,
                                              sums[g][t][h]);
                }
    }
    UNROLL for (int g = 0; g < G; g++) {
        const quad all = NAMED(folded)(sums[g]) * scale;
        memcpy(scores[g] + s, &all, sizeof all);
    }
}

/* Take `slope` times the distance off the scores, that of the first slot being `ago`; cap them if
 * there is a cap; then compute e^(score - largest). The largest and the sum are stored in `room`. */
TARGET INLINE void NAMED(soften_one)(float *scores, int64_t slots, float slope, int64_t ago,
                                     float cap, float *room) {
    float most = -INFINITY, lanes[16];
    floats all[SHARE] = {{0}}, largest = EACH(-INFINITY);
    for (int64_t s = 0; slope != 0.0f && s < slots; s++) scores[s] -= slope * (float)(ago - s);
    for (int64_t s = 0; cap > 0.0f && s < slots; s += WIDTH) {
        const floats score = NAMED(capped)(NAMED(at)(scores + s), cap);
        memcpy(scores + s, &score, sizeof score);
    }
    for (int64_t s = slots; s % 16; s++) scores[s] = -INFINITY;
    for (int64_t s = 0; s < slots; s += WIDTH) {
        const floats score = NAMED(at)(scores + s);
        const numbers larger = score > largest;
        largest = (floats)(((numbers)score & larger) | ((numbers)largest & ~larger));
    }
    for (int j = 0; j < WIDTH; j++) most = largest[j] > most ? largest[j] : most;
    for (int64_t s = 0; s < slots; s += 16)
        UNROLL for (int h = 0; h < SHARE; h++) {
            const floats e = NAMED(exponentials)(NAMED(at)(scores + s + h * WIDTH) - most);
            memcpy(scores + s + h * WIDTH, &e, sizeof e);
            all[h] += e;
        }
    memcpy(lanes, all, sizeof lanes);
    room[0] = most;
    room[1] = folded(lanes);
}

/* Weighted sums over all slots of N times 16 numbers of the values, from `i` on. */
TARGET INLINE void NAMED(add_values)(const int G, const int N, const int kind,
                                     const struct op *op, const struct place *p, int64_t i,
                                     float (*scores)[SLOTS], float *room) {
    const int64_t size = op->arg[10], values = op->arg[11], far = op->arg[23];
    floats sums[MOST_QUERIES][4 * SHARE];
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int n = 0; n < N * SHARE; n++) sums[g][n] = (floats){0};
    for (int64_t s = 0; s < p->slots; s++) {
        if (!i && s < p->behind) fetch_rows(p->k, (p->slots + s) * size, size, kind);
        UNROLL for (int n = 0; n < N * SHARE; n++) {
            const floats part = NAMED(cached)(p->v, s * far + i + n * WIDTH, kind);
            UNROLL for (int g = 0; g < G; g++)
                sums[g][n] = FUSED(part, EACH(scores[g][s]), sums[g][n]);
        }
    }
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int n = 0; n < N * SHARE; n++)
            memcpy(room + g * (values + 2) + 2 + i + n * WIDTH, &sums[g][n], sizeof sums[g][n]);
}

/* Prefetch: while computing scores, the next keys and the values of each 4 slots; while summing
 * values, the keys of the next block. */
TARGET INLINE void NAMED(attend_queries)(const int G, const int kind, const struct op *op,
                                         const float *q, const struct place *p, float *room,
                                         const float *slopes) {
    const int many = WIDTH == 16 ? 4 : 1; /* times 16 values, as registers allow */
    const int64_t size = op->arg[10], values = op->arg[11], far = op->arg[23];
    float scores[MOST_QUERIES][SLOTS];
    for (int64_t s = 0; s < p->slots; s += 4) {
        if (s + KEYS_AHEAD < p->slots + p->behind)
            fetch_rows(p->k, (s + KEYS_AHEAD) * size, 4 * size, kind);
        fetch_rows(p->v, s * far, 4 * far, kind);
        NAMED(score)(G, kind, op, q, p->k, s, p->slots, scores);
    }
    for (int g = 0; g < G; g++)
        NAMED(soften_one)(scores[g], p->slots, slopes ? slopes[g] : 0.0f, p->slots + p->behind - 1,
                          number(op->arg[21]), room + g * (values + 2));
    int64_t i = 0;
    for (; i + 16 * many <= values; i += 16 * many)
        NAMED(add_values)(G, many, kind, op, p, i, scores, room);
    for (; i < values; i += 16) NAMED(add_values)(G, 1, kind, op, p, i, scores, room);
}

TARGET static void NAMED(attend)(const struct op *op, int64_t item) {
    const struct place p = place_of(op, item);
    const int64_t size = op->arg[10], stride = op->arg[11] + 2, queries = op->arg[9];
    for (int64_t g = 0, n; g < queries; g += n) {
        n = queries - g < MOST_QUERIES ? queries - g : MOST_QUERIES;
#define QUERIES(n, kind)                                                                           \
    NAMED(attend_queries)(n, kind, op, p.q + g * size, &p, p.room + g * stride,                    \
                          p.slopes ? p.slopes + g : NULL)
#define EACH_COUNT(kind)                                                                           \
    switch (n) {                                                                                   \
        case 1: QUERIES(1, kind); break;                                                           \
        case 2: QUERIES(2, kind); break;                                                           \
        case 3: QUERIES(3, kind); break;                                                           \
        default: QUERIES(4, kind);                                                                 \
    }
        if (op->arg[18] == HALF_FLOATS) {
            EACH_COUNT(HALF_FLOATS)
        } else if (op->arg[18] == BFLOATS) {
            EACH_COUNT(BFLOATS)
        } else {
            n = 1;
            QUERIES(1, FLOATS);
        }
#undef EACH_COUNT
#undef QUERIES
    }
}

#undef floats
#undef numbers
#undef SHARE
