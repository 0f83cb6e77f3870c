/* Uploads of bytes in pinned host memory that ranks on several GPUs of one host need. PCIe is slow
 * and NVLink is fast. Therefore the ranks that update together (a cohort, cohort.h) divide the
 * bytes: each rank uploads its part once, and the others read it from that rank's GPU.
 *
 * A part is uploaded in rounds. Each rank has a progress page, shared memory that the others have
 * mapped, which has the rounds of a run that are in its GPU's memory. A rank uploads its own parts
 * first and waits for no other rank before they are done, so that ranks never wait for each other
 * in a circle. A rank that gives up notes it on its page. The others do not wait for a rank that
 * gave up, died, or made no progress for a while: they read its part from the pinned memory
 * themselves. */
#pragma once

#include "weights/internal.h"

int dray__progress_new(dray_region **out, dray_error *error);
/* Returns whether a region of another member can be read as its progress. */
bool dray__progress_is(const dray_region *region);
/* Ends the run: rounds that were not entered will not be. progress may be NULL. */
void dray__progress_end(dray_region *progress, uint64_t run);

/* The division of the uploads among the cohort, kept with the sources while there is one. */
typedef struct dray__upload dray__upload;
void dray__upload_forget(void *upload);
static inline dray__upload *dray__upload_of(const dray__sources *sources) /* NULL when there are
                                                                           * none */
{
    return dray__kept_find(sources->kept, dray__upload_forget);
}

/* Computes the division. The sources must have the layouts of the whole cohort. They and the
 * destination are borrowed. */
int dray__upload_find(dray__sources *sources, const dray__destination *destination,
                      dray_error *error);
/* Returns true when this rank reads parts from this member of the cohort. */
bool dray__upload_wants(const dray__upload *upload, uint32_t member);
/* Reads nothing from the member, because it cannot be reached. */
void dray__upload_lose(dray__upload *upload, uint32_t member);
