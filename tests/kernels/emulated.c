/* In place of levels.c, with emulated.h: every level is there. */
int llmcli_native_version(void) { return VERSION; }

unsigned llmcli_native_levels(void) { return LEVELS; }
