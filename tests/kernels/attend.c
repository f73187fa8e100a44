/* Attention of many tokens and of one, products of heads, mixtures of experts (experts.c), recurrent
 * mixers (recurrent.c) and what lies between products (steps.c), at level `argv[1]`, over random shapes:
 * prints a hash of all results of each, which is the same at every level and on every machine. Every
 * buffer has exactly the size it needs. */
#include <stdio.h>

#include "drawn.h"

void llmcli_run(const struct op *, int64_t, struct counter *, const struct team *, int64_t *);
unsigned llmcli_native_levels(void);
uint64_t experts(const struct team *team);
uint64_t recurrent(const struct team *team);
uint64_t steps(const struct team *team);

int main(int count, char **arguments) {
    const struct team team = {count > 1 ? atoi(arguments[1]) : 0, NULL, 1};
    uint64_t hash = 14695981039346656037ull;
    llmcli_native_levels(); /* asks for tiles */
    for (int turn = 0; turn < 60; turn++) {
        const int64_t B = 1 + below(3), K = 1 + below(3), G = turn % 9 ? 1 + below(6) : 1 + below(128);
        const int64_t most = turn % 9 == 0 ? 8 : turn % 7 == 0 ? 20 : 70; /* of many heads few tokens */
        const int64_t T = 1 + below(most), d = 1 + below(turn % 7 ? 40 : 512), e = 1 + below(40);
        const int64_t window = (below(3) - 1) * (1 + below(90)), kept = below(3), H = K * G;
        int64_t *starts = malloc((size_t)B * sizeof *starts), slots = 0;
        for (int64_t b = 0; b < B; b++) {
            starts[b] = below(150);
            slots = starts[b] + T > slots ? starts[b] + T : slots;
        }
        void *q = drawn(B * T * H * d, 0), *k = drawn(B * K * slots * d, kept);
        void *v = drawn(B * K * slots * e, kept);
        const int64_t cap = below(2) ? bits_of(1.5f) : 0;
        void *sinks = below(2) ? drawn(H, 0) : NULL, *slopes = below(2) ? drawn(H, 0) : NULL;
        float *out = malloc((size_t)(B * T * H * e) * sizeof *out);
        const struct op op = {
            ATTEND_ROWS,
            {to(q), to(k), to(v), K * slots * d, K * slots * e, slots * d, slots * e, B, K, G, d, e,
             bits_of(0.4f), window, to(starts), 1, kept, T * H * d, d, H * d, T, to(out), cap, to(sinks),
             to(slopes)},
        };
        struct counter counters[2];
        llmcli_run(&op, 1, counters, &team, NULL);
        hash = hashed(hash, out, B * T * H * e);
        free(q), free(k), free(v), free(out);

        /* one token, over more slots, in heads of a multiple of 16 */
        const int64_t D = 16 * (1 + below(turn % 7 ? 6 : 32)), E = 16 * (1 + below(6));
        const int64_t more = below(700), blocks = (slots + more + 255) / 256 + 1;
        for (int64_t b = 0; b < B; b++) starts[b] += more;
        slots += more;
        q = drawn(B * H * D, 0), k = drawn(B * K * slots * D, kept);
        const int64_t own = E > D || below(2); /* or values are the first numbers of the keys of all heads */
        const int64_t far = own ? E : D, k_head = own ? slots * D : 0, v_head = own ? slots * E : 0;
        v = drawn(B * K * slots * E, kept), out = malloc((size_t)(B * H * E) * sizeof *out);
        float *room = malloc((size_t)(B * H * blocks * (E + 2)) * sizeof *room);
        struct op ops[2] = {{
            ATTEND,
            {to(q), to(k), to(own ? v : k), K * slots * D, K * slots * far, k_head, v_head, B, K, G, D, E,
             bits_of(0.4f), window, to(starts), 1, to(room), blocks, kept, H * D, to(out),
             cap, to(sinks), far, to(slopes)},
        }};
        ops[1] = ops[0], ops[1].kind = COMBINE;
        llmcli_run(ops, 2, counters, &team, NULL);
        hash = hashed(hash, out, B * H * E);
        free(room), free(sinks), free(slopes);
        free(starts), free(q), free(k), free(v), free(out);

        /* a row of each head with a matrix of 16 C columns, which are what goes in or what comes out */
        const int64_t turned = below(2), numbers = below(3), N = 1 + below(90), C = 16 * (1 + below(40));
        const int64_t inputs = turned ? N : C, outputs = turned ? C : N, behind = below(2) * below(20);
        const int64_t given = inputs + behind, made = outputs + behind;
        q = drawn(B * H * given, 0), k = drawn(H * N * C, numbers);
        v = drawn(B * H * 3, 0), out = malloc((size_t)(B * H * made) * sizeof *out);
        float *both = malloc((size_t)(B * H * (given + 3)) * sizeof *both);
        const struct op products[2] = {
            {MULTIPLY_HEADS, {to(q), H * given, given, to(k), N * C, C, to(out), B, H, inputs, outputs,
                              behind, numbers, turned}},
            {JOIN, {to(q), given, given, to(v), 3, to(both), B, H, H * given}},
        };
        llmcli_run(products, 2, counters, &team, NULL);
        hash = hashed(hashed(hash, out, B * H * made), both, B * H * (given + 3));
        free(q), free(k), free(v), free(out), free(both);
    }
    printf("%016llx\n", (unsigned long long)hash);
    printf("%016llx\n", (unsigned long long)experts(&team));
    printf("%016llx\n", (unsigned long long)recurrent(&team));
    printf("%016llx\n", (unsigned long long)steps(&team));
    return 0;
}
