/* The messages between publishers or subscribers and the registry: a struct for each, and a table
 * of its fields (messages.c). docs/wire.md lists them. Sums (weights/sums.h) follow some of them.
 * Timeouts are relative, in nanoseconds. Messages of an opened publisher or subscriber begin with
 * its key, which the answer to its opening has. WEIGHTS_CLOSE, GROUP_STATE, PREFETCH_DROP (this
 * rank's staging is freed) and REGIONS_REVOKED are a key alone. A message is "kept" when its answer
 * waits for an event.
 *
 *  REGION_PUT         has one descriptor; that of GPU memory may have none
 *  UPDATE_SOURCES     TRAINER: of a publisher's own trainer; kept until all ranks are there.
 *                     MEMBERS: the set's ranks from `index` on, as many as fit 1 MiB, at least one
 *  REGION_GET         the answer has the descriptor, too
 *  PUBLISH_SUMS       the sums of a version that PUBLISH announced without them; no group commits
 *                     the version before the sums of all ranks are there
 *  PUBLISHER_WAIT     kept until no reader has the version or an older one; at the deadline,
 *                     readers are dropped
 *  PUBLISHER_DELIVER  kept until `count` groups (of these names, or any) have committed the version
 *                     or a newer one
 *  UPDATE_BEGIN       kept until all ranks have begun and a version is there
 *  UPDATE_WRITING     bytes are about to be overwritten; kept while other groups read them, at most
 *                     for the lease
 *  UPDATE_VOTE        is followed by the sums read, the sums expected (rank 0 of a disk update: the
 *                     sums in the checkpoint's files), u8 held (enum dray__held), and, if that is
 *                     OWN, the sums of the rank's memory by its own names and dtypes. Kept until
 *                     all ranks have voted. The answer means that the update is committed. After
 *                     an error the group keeps its version, or is torn (DRAY_ETORN)
 *  UPDATE_REPORT      has no answer; the registry keeps it, and posts it as a report "update"
 *  CHECKSUMS_GET      group "": of the publishers. The sums follow the answer
 *  SUBSCRIBER_LEAVE   the group leaves the router's list; kept while other groups read its memory.
 *                     Their leases end at the deadline
 *  ENGINES_WATCH      kept until the list has a newer sequence number, or the deadline
 *  REGIONS_MOVE       the publisher's memory has moved. Its versions are withdrawn; the answer is
 *                     the new id of the set. Without bytes of a layout, the layout is the same
 *  REGIONS_RELEASE    takes the regions back: kept until no group reads them and no member has
 *                     them mapped, or until the deadline, at which readers are dropped
 *  REGIONS_DROP       the reader has unmapped the regions that it imported of the set
 *  REGIONS_REVOKED    the answer has the sets that this rank has imported and that were taken back
 */
#pragma once

#include "base/wire.h"
#include "weights/sums.h"

#include <dray/weights.h>

#define DRAY__WORLD_MAX 65536u /* ranks of a publisher, or of a group */
#define DRAY__COHORT_MAX 64u   /* members of one cohort */

enum { DRAY__SOURCES_TRAINER = 0, DRAY__SOURCES_MEMBERS = 1 };

/* The purpose of an update: PREFETCH fills the ranks' staging and leaves their weights unchanged,
 * COMMIT puts the staging in their place. */
enum dray__purpose { DRAY__UPDATE = 0, DRAY__PREFETCH = 1, DRAY__COMMIT = 2 };
enum dray__source_kind {
    DRAY__FROM_PUBLISHERS = 0,
    DRAY__FROM_PEERS = 1,
    DRAY__FROM_DISK = 2,
    DRAY__FROM_STAGING = 3
};
/* The statement of a vote about the rank's memory: none, the bits and names that it has read, or
 * sums that follow. */
enum dray__held {
    DRAY__HELD_UNKNOWN = 0,
    DRAY__HELD_AS_READ = 1,
    DRAY__HELD_OWN = 2,
    DRAY__HELD_MOVED = 3 /* the staged version, in other memory: old handles are void */
};

/* PUBLISHER_OPEN (without group), SUBSCRIBER_OPEN (without slot_bytes). */
typedef struct dray__enrolling {
    const char *model, *group, *endpoint; /* endpoint: of its data server; "" when none */
    uint32_t rank, world, regions;
    uint32_t to_put; /* the regions that will be put; a subscriber whose group others may read puts
                      * all */
    uint64_t token;
    uint64_t slot_bytes; /* of its staging arena, which is the last region then; 0 when it has
                          * none */
    const void *layout;
    size_t layout_size;
} dray__enrolling;

/* The earlier state of a rank that registers again after a restart. It follows the opening. */
typedef struct dray__rank_claim {
    bool given;
    uint64_t set, version, incarnation; /* of publishers: the one it published last, if any */
    bool published, checked, readable;
    dray__sums sums;     /* of publishers; they follow */
    uint8_t state, mode; /* of subscribers */
    bool staged;
    uint64_t staged_version, staged_incarnation;
} dray__rank_claim;

typedef struct dray__region_given { /* REGION_PUT; the answer to REGION_GET: the handle alone */
    uint64_t key;
    uint32_t region;
    const void *handle;
    size_t handle_size;
} dray__region_given;

typedef struct dray__sources_asked { /* UPDATE_SOURCES */
    uint64_t key, set;
    uint8_t what;
    int64_t timeout_ns;
    uint32_t index;
} dray__sources_asked;

typedef struct dray__trainer_told { /* its answers */
    uint64_t incarnation, set;
    uint32_t world;
} dray__trainer_told;

typedef struct dray__member_told {
    uint64_t key, member, host, token, slot_bytes;
    int64_t pid;
    const char *endpoint, *name;
    bool mapped; /* the reader can map its shared regions */
    const void *layout;
    size_t layout_size;
    uint32_t regions;
} dray__member_told;

typedef struct dray__members_told {
    const dray__member_told *items;
    uint32_t count;
} dray__members_told;

typedef struct dray__region_asked { /* REGION_GET */
    uint64_t key, set;
    uint32_t index, region;
} dray__region_asked;

/* The sums of a PUBLISH: there are none, they follow it, or PUBLISH_SUMS will have them. */
enum dray__checked { DRAY__UNCHECKED = 0, DRAY__CHECKED = 1, DRAY__CHECKED_LATER = 2 };

typedef struct dray__announcing { /* PUBLISH; sums follow */
    uint64_t key, version;
    uint8_t checked; /* dray__checked */
} dray__announcing;

typedef struct dray__summing { /* PUBLISH_SUMS; sums follow */
    uint64_t key, version;
    int32_t code; /* 0, or the error with which they could not be computed */
    const char *message;
} dray__summing;

typedef struct dray__draining { /* PUBLISHER_WAIT */
    uint64_t key, version;
    int64_t timeout_ns;
} dray__draining;

typedef struct dray__drained { /* its answer */
    uint32_t dropped;
    const char *names;       /* the names of dropped groups */
    uint64_t oldest_attempt; /* the oldest one that may still read */
} dray__drained;

typedef struct dray__delivering { /* PUBLISHER_DELIVER */
    uint64_t key, version;
    uint32_t count, name_count;
    const char *const *names;
    int64_t timeout_ns;
} dray__delivering;

typedef struct dray__update_wish { /* UPDATE_BEGIN */
    uint64_t key, min_version, path_version;
    uint8_t mode, purpose;
    const char *path;
    bool verify, publishers_only;
    int64_t timeout_ns;
    uint64_t ready_source, ready_group; /* sets that the rank is prepared for; 0 for none */
} dray__update_wish;

typedef struct dray__update_begun { /* its answer */
    uint64_t attempt, incarnation, version, source_set, group_set, cohort_set;
    uint8_t mode, source;
    bool compared, granted; /* granted: UPDATE_WRITING is not needed: all ranks were prepared */
    uint32_t sources, ranks, partial_count, cohort;
    const char *const *partial; /* tensors that the group holds in part */
    uint64_t run;               /* of this cohort's update */
    uint64_t last;              /* the member that published the version last; 0 when none did */
} dray__update_begun;

typedef struct dray__writing { /* UPDATE_WRITING */
    uint64_t key, attempt;
    int64_t lease_ns;
} dray__writing;

typedef struct dray__voting { /* UPDATE_VOTE, up to its sums */
    uint64_t key, attempt;
    int32_t code; /* 0 for ok */
    const char *message;
    int64_t timeout_ns;
} dray__voting;

typedef struct dray__committed { /* its answer */
    uint64_t tensors, bytes;     /* compared ones */
} dray__committed;

typedef struct dray__update_told { /* UPDATE_REPORT */
    uint64_t key;
    const char *json;
} dray__update_told;

typedef struct dray__group_told { /* the answer to GROUP_STATE */
    uint64_t version, incarnation, epoch;
    uint8_t state;
} dray__group_told;

typedef struct dray__sums_asked { /* CHECKSUMS_GET */
    const char *model, *group;
} dray__sums_asked;

typedef struct dray__sums_told { /* its answer, up to the sums */
    uint64_t version, incarnation;
} dray__sums_told;

typedef struct dray__timed { /* SUBSCRIBER_LEAVE, REGIONS_RELEASE */
    uint64_t key;
    int64_t timeout_ns;
} dray__timed;

typedef struct dray__watching { /* ENGINES_WATCH */
    uint64_t sequence;          /* of the list that the sender has */
    int64_t timeout_ns;
} dray__watching;

typedef struct dray__engine_told {
    const char *model, *group;
    uint64_t version, incarnation, epoch;
    uint32_t ranks, world;
    uint8_t state;
    bool serving, leaving;
} dray__engine_told;

typedef struct dray__engines_told { /* its answer */
    uint64_t sequence;
    const dray__engine_told *items;
    uint32_t count;
} dray__engines_told;

typedef struct dray__moving { /* REGIONS_MOVE */
    uint64_t key, token;
    uint32_t regions, to_put;
    const void *layout;
    size_t layout_size;
} dray__moving;

typedef struct dray__pin_told {
    uint64_t member, bytes;
    const char *name;
} dray__pin_told;

typedef struct dray__pins_told { /* the answer to REGIONS_RELEASE */
    const dray__pin_told *items;
    uint32_t count;
} dray__pins_told;

typedef struct dray__set_told { /* REGIONS_DROP */
    uint64_t key, set;
} dray__set_told;

typedef struct dray__sets_told { /* the answer to REGIONS_REVOKED */
    const uint64_t *items;
    uint32_t count;
} dray__sets_told;

extern const dray__fields dray__publisher_open_fields, dray__publisher_claim_fields,
    dray__subscriber_open_fields, dray__subscriber_claim_fields, dray__region_given_fields,
    dray__handle_told_fields, dray__sources_asked_fields, dray__trainer_told_fields,
    dray__members_told_fields, dray__region_asked_fields, dray__announcing_fields,
    dray__summing_fields, dray__draining_fields, dray__drained_fields, dray__delivering_fields,
    dray__update_wish_fields, dray__update_begun_fields, dray__writing_fields, dray__voting_fields,
    dray__committed_fields, dray__update_told_fields, dray__group_told_fields,
    dray__sums_asked_fields, dray__sums_told_fields, dray__timed_fields, dray__watching_fields,
    dray__engines_told_fields, dray__moving_fields, dray__pins_told_fields, dray__set_told_fields,
    dray__sets_told_fields;
