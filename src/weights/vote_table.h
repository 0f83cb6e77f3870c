/* The sums of a vote in the form of the last one: which item each destination tensor is, so that
 * the next table is made without a look at names. Kept with the sources, whose plan it depends on.
 */
#ifndef DRAY_WEIGHTS_VOTE_TABLE_H
#define DRAY_WEIGHTS_VOTE_TABLE_H

#include "weights/haul.h"

typedef struct dray__vote_table dray__vote_table;

dray__vote_table *dray__vote_table_new(void); /* NULL: out of memory */
void dray__vote_table_free(dray__vote_table *table);
/* The table of these sums, one a tensor, whose names are `names`. false: out of memory. */
bool dray__vote_table_fill(dray__vote_table *table, const struct dray__tensor_sum *tensors,
                           const char *const *names, uint32_t count, dray__sums *out);
/* Does the layout call all its tensors as the source does, and quantise none? */
bool dray__vote_table_plain(dray__vote_table *table, const dray_layout *layout,
                            const char *const *names, bool *quantised);

#endif
