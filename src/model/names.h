/* The names of a layout's tensors: a hash table of indices, with the hashes by index for whoever
 * looks up many layouts' names in a table of his own. */
#ifndef DRAY_MODEL_NAMES_H
#define DRAY_MODEL_NAMES_H

#include <dray/model.h>
#include <stdbool.h>

typedef struct dray__tensor_names {
    uint64_t *hashes; /* of tensor 0, 1, ... */
    uint32_t count, capacity;
    uint32_t *slots; /* open addressing: index + 1; 0: free */
    uint32_t slot_count;
} dray__tensor_names;

void dray__tensor_names_free(dray__tensor_names *names);
uint64_t dray__name_hash(const char *name);
/* tensors: those counted, by index. false: not there. */
bool dray__tensor_names_find(const dray__tensor_names *names, const dray_tensor_info *tensors,
                             const char *name, uint64_t hash, uint32_t *index);
/* Names tensor `count`, whose name is not there yet. false: out of memory, and nothing changed. */
bool dray__tensor_names_add(dray__tensor_names *names, uint64_t hash);
/* Forgets the tensor named last. */
void dray__tensor_names_pop(dray__tensor_names *names);

#endif
