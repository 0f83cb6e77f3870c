/* The messages of weights, as publishers, subscribers and the registry write and read them: a
 * struct each, and a table of its fields (messages.c), which docs/wire.md lists. Sums
 * (weights/sums.h) follow some of them. Timeouts are relative, nanoseconds. Messages of an opened
 * publisher or subscriber begin with its key, which its opening answers; WEIGHTS_CLOSE,
 * GROUP_STATE, PREFETCH_DROP (this rank's staging is gone) and REGIONS_REVOKED are a key alone.
 *
 *  REGION_PUT         comes with one descriptor; CUDA: or none
 *  UPDATE_SOURCES     GANG: of a publisher's own gang; kept until all ranks are there.
 *                     MEMBERS: the set's ranks from `index` on, as many as go into 1 MiB, at least
 *                     one
 *  REGION_GET         answers with the descriptor, too
 *  PUBLISH_SUMS       the sums of a version that PUBLISH announced before they were taken; no group
 *                     commits it before those of all ranks are there
 *  PUBLISHER_WAIT     answers when no reader has the version or an older one, or at the deadline,
 *                     at which readers are dropped
 *  PUBLISHER_DELIVER  kept until `count` groups (those that are named, or any) have committed the
 *                     version, or a newer one
 *  UPDATE_BEGIN       kept until all ranks began and a version is there
 *  UPDATE_WRITING     bytes are about to be overwritten; kept while other groups read them, at most
 *                     for the lease
 *  UPDATE_VOTE        is followed by the sums read, the sums expected (rank 0 of a disk update:
 * what the checkpoint says of itself), u8 held (enum dray__held), and the sums held (if it says so:
 * of what lies in memory now, by the rank's own names and dtypes); kept until all voted. Its
 * answer: committed. Errors: aborted (the group keeps what it had) or DRAY_ETORN. UPDATE_REPORT a
 * notice; the registry keeps it, and posts it as a report "update" CHECKSUMS_GET      group "": of
 * the publishers. The answer is followed by the sums SUBSCRIBER_LEAVE   the group leaves the
 * router; then it is kept while others read its memory, who are revoked at the deadline
 *  ENGINES_WATCH      kept until there is a newer sequence or the deadline
 *  REGIONS_MOVE       the publisher's memory is elsewhere; what it published is withdrawn, the set
 *                     has a new id, which is the answer. layout: of no bytes: as before
 *  REGIONS_RELEASE    the regions are taken back: kept until no group reads and no member has them
 *                     mapped, or the deadline, at which readers are dropped
 *  REGIONS_DROP       what was imported of the set is unmapped
 *  REGIONS_REVOKED    answers with the sets that this rank has imported and that were taken back
 */
#pragma once

#include "base/wire.h"
#include "weights/sums.h"

#include <dray/weights.h>

#define DRAY__WORLD_MAX 65536u /* ranks of a publisher, or of a group */
#define DRAY__COHORT_MAX 64u   /* members of one cohort */

enum { DRAY__SOURCES_GANG = 0, DRAY__SOURCES_MEMBERS = 1 };

/* What an update is for: PREFETCH fills the ranks' staging and leaves what they hold alone, COMMIT
 * copies the staging. */
enum dray__purpose { DRAY__UPDATE = 0, DRAY__PREFETCH = 1, DRAY__COMMIT = 2 };
enum dray__source_kind {
    DRAY__FROM_PUBLISHERS = 0,
    DRAY__FROM_PEERS = 1,
    DRAY__FROM_DISK = 2,
    DRAY__FROM_STAGING = 3
};
/* What a rank says of its own memory in a vote: nothing, the same bits under the same names as it
 * read, or sums of their own. */
enum dray__held {
    DRAY__HELD_UNKNOWN = 0,
    DRAY__HELD_AS_READ = 1,
    DRAY__HELD_OWN = 2,
    DRAY__HELD_MOVED = 3 /* what was staged, in other memory: the handles of its regions are void */
};

/* PUBLISHER_OPEN (without group), SUBSCRIBER_OPEN (without slot_bytes). */
typedef struct dray__enrolling {
    const char *model, *group, *endpoint; /* endpoint: of its data server; "": it has none */
    uint32_t rank, world, regions;
    uint32_t to_put; /* of the regions; all of a subscriber's: other groups may read this one */
    uint64_t token;
    uint64_t slot_bytes; /* of its staging arena, which is the last region then; 0: it has none */
    const void *layout;
    size_t layout_size;
} dray__enrolling;

/* What a rank that comes back after a restart says that it was: it follows its opening. */
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

typedef struct dray__gang_told { /* its answers */
    uint64_t incarnation, set;
    uint32_t world;
} dray__gang_told;

typedef struct dray__member_told {
    uint64_t key, member, host, token, slot_bytes;
    int64_t pid;
    const char *endpoint, *name;
    bool mapped; /* can its shared regions be? */
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

/* What PUBLISH says of the version's sums: there are none, they follow, they come with
 * PUBLISH_SUMS.
 */
enum dray__checked { DRAY__UNCHECKED = 0, DRAY__CHECKED = 1, DRAY__CHECKED_LATER = 2 };

typedef struct dray__announcing { /* PUBLISH; sums follow */
    uint64_t key, version;
    uint8_t checked; /* dray__checked */
} dray__announcing;

typedef struct dray__summing { /* PUBLISH_SUMS; sums follow */
    uint64_t key, version;
    int32_t code; /* 0: ok; else they could not be taken */
    const char *message;
} dray__summing;

typedef struct dray__draining { /* PUBLISHER_WAIT */
    uint64_t key, version;
    int64_t timeout_ns;
} dray__draining;

typedef struct dray__drained { /* its answer */
    uint32_t dropped;
    const char *names;       /* theirs */
    uint64_t oldest_attempt; /* that may still read */
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
    uint64_t ready_source, ready_group; /* sets that the rank is prepared for; 0: none */
} dray__update_wish;

typedef struct dray__update_begun { /* its answer */
    uint64_t attempt, incarnation, version, source_set, group_set, cohort_set;
    uint8_t mode, source;
    bool compared, granted; /* granted: UPDATE_WRITING need not be asked: all ranks were prepared */
    uint32_t sources, ranks, partial_count, cohort;
    const char *const *partial; /* tensors that the group holds in part */
    uint64_t run;               /* of this cohort's update */
    uint64_t last;              /* the member that published the version last; 0: none did */
} dray__update_begun;

typedef struct dray__writing { /* UPDATE_WRITING */
    uint64_t key, attempt;
    int64_t lease_ns;
} dray__writing;

typedef struct dray__voting { /* UPDATE_VOTE, as far as its sums */
    uint64_t key, attempt;
    int32_t code; /* 0: ok */
    const char *message;
    int64_t timeout_ns;
} dray__voting;

typedef struct dray__committed { /* its answer */
    uint64_t tensors, bytes;     /* that were compared */
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

typedef struct dray__sums_told { /* its answer, as far as the sums */
    uint64_t version, incarnation;
} dray__sums_told;

typedef struct dray__timed { /* SUBSCRIBER_LEAVE, REGIONS_RELEASE */
    uint64_t key;
    int64_t timeout_ns;
} dray__timed;

typedef struct dray__watching { /* ENGINES_WATCH */
    uint64_t sequence;          /* that is known */
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
    dray__handle_told_fields, dray__sources_asked_fields, dray__gang_told_fields,
    dray__members_told_fields, dray__region_asked_fields, dray__announcing_fields,
    dray__summing_fields, dray__draining_fields, dray__drained_fields, dray__delivering_fields,
    dray__update_wish_fields, dray__update_begun_fields, dray__writing_fields, dray__voting_fields,
    dray__committed_fields, dray__update_told_fields, dray__group_told_fields,
    dray__sums_asked_fields, dray__sums_told_fields, dray__timed_fields, dray__watching_fields,
    dray__engines_told_fields, dray__moving_fields, dray__pins_told_fields, dray__set_told_fields,
    dray__sets_told_fields;
