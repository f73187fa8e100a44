/* Tiles of AMX: 8 registers of up to 16 rows of 64 bytes.
 *
 * TILE_DOT adds the products of a's rows and b's columns of bytes to 16 x 16 int32 numbers,
 * TILE_DOT_BFLOAT16 those of bfloat16 numbers to float32; a row of b interleaves 4 consecutive
 * bytes, or 2 numbers, of each column.
 */
#ifndef LLMCLI_AMX_H
#define LLMCLI_AMX_H

#include "common.h"

/* `tmm` is a number. GCC's macros do not declare that a load reads memory. */
#ifndef TILE_LOAD
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)))
#define TILE_CONFIGURATION(config) __asm__ volatile("sttilecfg %0" : "=m"(*(config)))
#define TILE_ZERO(tmm) __asm__ volatile("tilezero %%tmm" #tmm ::)
#define TILE_LOAD(tmm, at, stride)                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tmm ::"r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tmm, at, stride)                                                                \
    __asm__ volatile("tilestored %%tmm" #tmm ", (%0,%1,1)" ::"r"(at), "r"((int64_t)(stride))       \
                     : "memory")
#define TILE_DOT(sum, a, b)                                                                        \
    __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define TILE_DOT_BFLOAT16(sum, a, b)                                                               \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#endif

struct tile_config {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

#endif
