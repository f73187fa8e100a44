/* Random numbers for programs that run the kernels; the same on every machine. */
#ifndef LLMCLI_DRAWN_H
#define LLMCLI_DRAWN_H

#include "program.h"

static uint32_t state = 1;

static uint32_t next(void) { return (state = state * 1664525u + 1013904223u) >> 8; }

static int64_t below(int64_t count) { return next() % count; }

/* Numbers from -1 to 1; of bfloat16 (1) and float16 (2) the bits of such ones. */
static void *drawn(int64_t count, int64_t narrow) {
    float *numbers = malloc((size_t)count * (narrow ? 2 : 4));
    for (int64_t i = 0; i < count; i++) {
        float number = (float)next() / 8388608.0f - 1.0f;
        if (narrow == 2) ((uint16_t *)numbers)[i] = (uint16_t)(next() & 0xbbff);
        else if (narrow) ((uint16_t *)numbers)[i] = (uint16_t)(bits_of(number) >> 16);
        else numbers[i] = number;
    }
    return numbers;
}

static int64_t to(const void *memory) { return (int64_t)(intptr_t)memory; }

/* FNV-1a of the numbers' bits; one NaN is as good as another. */
static uint64_t hashed(uint64_t hash, const float *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = numbers[i] == numbers[i] ? bits_of(numbers[i]) : 0x7fc00000;
        hash = (hash ^ bits) * 0x100000001b3ull;
    }
    return hash;
}

#endif
