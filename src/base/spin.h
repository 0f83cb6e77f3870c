/* Looking for what is about to come, instead of sleeping for it: where the other side runs on
 * another CPU that costs less, for both, than to be put to sleep and woken. Where it does not come
 * in time, or came only because the looking thread was put off the CPU for it, the next looks are
 * left out: twice as many each time, so that what they take is next to nothing. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* DRAY__SPIN_GAP_NS: what a look that finds nothing never takes on a CPU of one's own. */
enum { DRAY__SPIN_NS = 50000, DRAY__SPIN_GAP_NS = 2500, DRAY__SPIN_REST = 512 };

/* Zero-initialised. */
typedef struct dray__spin {
    int64_t last_ns, until_ns;
    uint32_t rest, left; /* looks to leave out after the last one that failed; of them left */
} dray__spin;

/* false: do not look now. */
bool dray__spin_begin(dray__spin *spin, int64_t deadline_ns);
/* After a look that found nothing. false: look no more. */
bool dray__spin_again(dray__spin *spin);
/* It was found at this time; 0: it was not. */
void dray__spin_end(dray__spin *spin, int64_t found_ns);
