/* The policies by which claims get rows (dray/queue.h): their names and properties, for all code
 * that reads or shows a policy. */
#pragma once

#include <dray/queue.h>

enum dray__policy_trait {
    DRAY__POLICY_IN_ORDER = 1, /* a partition is used only when earlier ones have no rows left */
    DRAY__POLICY_BY_GROUP = 2, /* the count must be a multiple of the group's size */
    DRAY__POLICY_LEAVES = 4,   /* it knows DRAY_FRESH_LEFT */
    DRAY__POLICY_ROUNDS = 8,   /* the rows are divided among the ranks of a consumer group */
    DRAY__POLICY_LOCKSTEP = 16 /* and every rank gets the same number of micro-batches */
};

/* The one table of policies, in the order of enum dray_policy: XX(of dray_policy, name, the
 * function of table/policy.c that picks rows, traits, the reason why jobs cannot have it (NULL:
 * they can)). A new policy is a line here, its number in dray/queue.h, and its function. */
#define DRAY__POLICY_MAP(XX)                                                                       \
    XX(FIFO, fifo, fifo, DRAY__POLICY_LEAVES, NULL)                                                \
    XX(ORDERED, ordered, ordered, DRAY__POLICY_IN_ORDER, NULL)                                     \
    XX(GROUP, group, group, DRAY__POLICY_BY_GROUP | DRAY__POLICY_LEAVES, NULL)                     \
    XX(OLDEST_VERSION, oldest_version, oldest_version, 0, NULL)                                    \
    XX(PRIORITY, priority, priority, 0,                                                            \
       "is not for runs, where nothing gives samples the tag priority")                            \
    XX(TOKEN_BALANCED, token_balanced, oldest_version, DRAY__POLICY_ROUNDS, NULL)                  \
    XX(LOCKSTEP, lockstep, oldest_version, DRAY__POLICY_ROUNDS | DRAY__POLICY_LOCKSTEP,            \
       "is not for runs, where rank 0 of the trainer claims for all its ranks, which cannot get "  \
       "unequal counts")

/* Returns the traits of a policy; 0 for a number that is not a policy's. */
unsigned dray__policy_traits(int32_t policy); /* messages.c */
