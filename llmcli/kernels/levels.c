/* Detects processor levels. */
#define _DEFAULT_SOURCE /* syscall, sigaction */
#include "common.h"

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <string.h>
#include <unistd.h>
#endif

#ifdef X86
#include <cpuid.h>
#endif
#if defined(WITH_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(X86) && defined(__linux__)
#include <sys/syscall.h>
#endif

/* Incremented when exported functions or their arguments change. */
int llmcli_native_version(void) { return 30; }

/* The levels supported by processor and operating system: bit i for `enum level` i. */
unsigned llmcli_native_levels(void) {
    unsigned levels = 1u << PORTABLE;
#ifdef X86
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return levels;
    if (!(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C)) return levels;
    /* Registers saved by the system: bits 1 and 2 for AVX, 5 to 7 for AVX-512. */
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return levels;
    if ((b & bit_AVX2) && (saved & 0x6) == 0x6) {
        levels |= 1u << AVX2;
        if ((b & avx512) == avx512 && (saved & 0xe6) == 0xe6) {
            levels |= 1u << AVX512;
            if (c & bit_AVX512VNNI) {
                unsigned e, unused;
                levels |= 1u << VNNI;
                if (__get_cpuid_count(7, 1, &e, &unused, &unused, &unused) && (e & bit_AVX512BF16))
                    levels |= 1u << AVX512BF16;
            }
#ifdef __linux__
            /* Tiles of bfloat16 and of bytes; bits 17 and 18 of saved registers, after a request by
             * the process. */
            if ((c & bit_AVX512VNNI) && (d >> 22 & 13) == 13 && (saved >> 17 & 3) == 3 &&
                !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */))
                levels |= 1u << AMX;
#endif
        }
    }
#endif
#ifdef WITH_DOTPROD
    int dot_products = 1; /* assumed if a compiler flag is set, and on Apple silicon */
#if defined(__linux__) && !defined(__ARM_FEATURE_DOTPROD)
    dot_products = getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#endif
    if (dot_products) levels |= 1u << DOTPROD;
#endif
    return levels;
}

/* If a mapped file was truncated, or its disk failed, exit with a message and code 4: this signal
 * is the only indication that the memory is unreadable. */
#ifdef SIGBUS
static char cut[256];

static void on_cut(int signal) {
    (void)signal;
    if (write(2, cut, strlen(cut)) < 0) _exit(4);
    _exit(4);
}
#endif

void llmcli_when_cut(const char *message) {
#ifdef SIGBUS
    struct sigaction action = {.sa_handler = on_cut};
    strncpy(cut, message, sizeof cut - 1);
    sigaction(SIGBUS, &action, NULL);
#else
    (void)message;
#endif
}
