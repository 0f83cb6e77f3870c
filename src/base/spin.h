/* Spinning: a thread looks again and again for an answer that will come soon, instead of sleeping.
 * If the other side runs on another CPU, this costs both less than sleep and wake-up. If the answer
 * does not come in time, or came only because the looking thread was taken off its CPU, the next
 * looks are left out, twice as many after each failure, so that failures cost little. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* DRAY__SPIN_GAP_NS: a look takes less than this, unless the thread was taken off its CPU. */
enum { DRAY__SPIN_NS = 50000, DRAY__SPIN_GAP_NS = 2500, DRAY__SPIN_REST = 512 };

/* Zero-initialised. */
typedef struct dray__spin {
    int64_t last_ns, until_ns;
    uint32_t rest; /* the number of looks to leave out after the last failure */
    uint32_t left; /* those of them that are still to be left out */
} dray__spin;

/* Returns false when the caller should sleep, and not look. */
bool dray__spin_begin(dray__spin *spin, int64_t deadline_ns);
/* Called after a look that found nothing. Returns false when the caller should stop looking. */
bool dray__spin_again(dray__spin *spin);
/* Ends the looking. found_ns is the time when the answer was found; 0 when it was not. */
void dray__spin_end(dray__spin *spin, int64_t found_ns);
