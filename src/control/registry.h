/* The registry: who holds which weights, which version is ready, who reads it, and the group commit
 * of updates. A state machine without sockets: it is handed decoded frames and answers tickets, now
 * or later. registry.c puts it behind the coordinator.
 *
 * Messages (payloads in base/wire.h's encoding; timeouts are relative, nanoseconds):
 *  PUBLISHER_OPEN   string model, u32 rank, u32 world, u64 token, string endpoint (of its data
 *                   server, ""), u32 regions, u32 of them to put, u64 bytes of a slot of its
 *                   staging arena, which is the last region then (0: it has none), blob layout; if
 *                   it comes back after the coordinator was started anew: u64 set, u64 incarnation,
 *                   u8 it has published, u64 version, u8 checksums are there, u8 it can be read,
 *                   sums
 *                   -> u64 key
 *  REGION_PUT       u64 key, u32 region, blob handle, one descriptor (CUDA: or none) -> (empty)
 *  UPDATE_SOURCES   u64 key, u8 what, i64 timeout, u64 set, u32 index; what:
 *                   GANG (a publisher's own gang; kept until all ranks are there)
 *                       -> u64 incarnation, u64 set, u32 world
 *                   MEMBERS (the set's ranks from `index` on, as many as go into 1 MiB, at least
 *                       one) -> u32 how many, of each: u64 key, u64 member, u64 host, i64 pid,
 *                       u64 token, string endpoint, u8 its shared regions can be mapped, string
 *                       name, blob layout, u32 regions, u64 bytes of a slot (0: no arena)
 *  REGION_GET       u64 key, u64 set, u32 index, u32 region -> blob handle, its descriptor
 *  PUBLISH          u64 key, u64 version, u8 checksums are there, sums -> (empty)
 *  PUBLISHER_WAIT   u64 key, u64 version, i64 timeout -> u32 dropped, string their names,
 *                   u64 the oldest attempt that may still read
 *  PUBLISHER_DELIVER u64 key, u64 version, u32 how many groups, u32 names, string each (none: any
 *                   groups), i64 timeout; kept until so many have committed the version, or a newer
 *                   one -> (empty)
 *  SUBSCRIBER_OPEN  string model, string group, u32 rank, u32 world, u64 token, string endpoint,
 *                   u32 regions, u32 of them to put (all: other groups may read this one), blob
 *                   layout; if it comes back: u64 set, u8 state, u8 mode, u64 version,
 *                   u64 incarnation, u8 it has prefetched, u64 version, u64 incarnation
 *                   -> u64 key
 *  UPDATE_BEGIN     u64 key, u8 mode, u64 min version, string path, u64 path version, u8 verify,
 *                   i64 timeout, u8 purpose, u8 from publishers only, u64 source set and u64 group
 *                   set that this rank is prepared for (0: none); kept until all ranks began and a
 *                   version is there
 *                   -> u64 attempt, u8 mode, u64 incarnation, u64 version, u8 checksums are there,
 *                      u64 source set, u32 sources, u64 group set, u32 ranks, u32 count and the
 *                      names of tensors that the group holds in part, u8 source, u8 granted:
 *                      UPDATE_WRITING need not be asked, because all ranks were prepared, u64
 *                      cohort set (0: none), u32 its members, u64 run (of this cohort's update),
 * u64 the member that published the version last (0: none did) UPDATE_WRITING   u64 key, u64
 * attempt, i64 lease -> (empty): bytes are about to be overwritten; kept while other groups read
 * them, at most for the lease UPDATE_VOTE      u64 key, u64 attempt, u32 code (0: ok), string
 * message, i64 timeout, sums read, sums expected (rank 0 of a disk update: what the checkpoint says
 * of itself), u8 held (enum dray__held), sums held (if it says so: of what lies in memory now, by
 * the rank's own names and dtypes); kept until all voted
 *                   -> u64 tensors compared, u64 bytes of them: committed. Errors: aborted (the
 *                   group keeps what it had) or DRAY_ETORN.
 *  GROUP_STATE      u64 key -> u64 version, u64 incarnation, u8 state, u64 epoch
 *  UPDATE_REPORT    u64 key, string json (a notice)
 *  CHECKSUMS_GET    string model, string group ("": the publishers)
 *                   -> u64 version, u64 incarnation, sums
 *  PREFETCH_DROP    u64 key -> (empty): this rank's staging is gone
 *  SUBSCRIBER_LEAVE u64 key, i64 timeout -> u32 revoked. The group leaves the router; then it is
 *                   kept while others read its memory, who are revoked at the deadline
 *  ENGINES_WATCH    u64 sequence that is known, i64 timeout; kept until there is a newer one or the
 *                   deadline -> u64 sequence, u32 groups, of each: string model, string name,
 *                   u64 version, u64 incarnation, u64 epoch, u32 ranks, u32 world, u8 state,
 *                   u8 serving, u8 leaving
 *  REGIONS_MOVE     u64 key, u64 token, u32 regions, u32 of them to put, blob layout (empty: as
 *                   before) -> u64 set: the publisher's memory is elsewhere; what it published is
 *                   withdrawn, the set has a new id
 *  REGIONS_RELEASE  u64 key, i64 timeout; the regions are taken back: kept until no group reads and
 *                   no member has them mapped, or the deadline, at which readers are dropped
 *                   -> u32 pins, of each: u64 member, u64 bytes, string name
 *  REGIONS_DROP     u64 key, u64 set -> (empty): what was imported of the set is unmapped
 *  REGIONS_REVOKED  u64 key -> u32 sets, u64 of each: imported by this rank, and taken back
 *  WEIGHTS_CLOSE    u64 key -> (empty)
 */
#ifndef DRAY_CONTROL_REGISTRY_H
#define DRAY_CONTROL_REGISTRY_H

#include "base/wire.h"

#include <dray/dray.h>
#include <jansson.h>

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
enum dray__held { DRAY__HELD_UNKNOWN = 0, DRAY__HELD_AS_READ = 1, DRAY__HELD_OWN = 2 };

typedef struct dray__registry dray__registry;

/* Who asks. The name is copied where it is kept. */
typedef struct dray__party {
    uint64_t member, host;
    int64_t pid;
    const char *name;
} dray__party;

typedef struct dray__registry_ops {
    /* Ends a ticket: with an error, or with a reply (payload NULL: empty; fd -1: none, else the
     * registry's to close). */
    void (*answer)(void *user, void *ticket, const dray_error *error, dray__writer *payload,
                   int fd);
    /* Asks for dray__registry_expired at the deadline. */
    void (*expire_at)(void *user, void *ticket, int64_t deadline_ns);
    void *user;
} dray__registry_ops;

int dray__registry_new(const dray__registry_ops *ops, dray__registry **out, dray_error *error);
/* The how-manyth registry of the same members this is, from 1: ids, attempts and incarnations are
 * none of those before. */
void dray__registry_begin(dray__registry *registry, uint64_t generation);
void dray__registry_free(dray__registry *registry);

/* One request. fd: its descriptor or -1; the registry's from here. The ticket is answered exactly
 * once, in this call or a later one. */
void dray__registry_handle(dray__registry *registry, const dray__party *party, uint16_t type,
                           dray__reader *payload, int fd, void *ticket);
/* A kept ticket's deadline passed, or nobody is there to hear the answer; it is answered. */
void dray__registry_expired(dray__registry *registry, void *ticket, int gone);
/* All that the member had opened ends. */
void dray__registry_member_ended(dray__registry *registry, uint64_t member);
/* Adds "publishers", "versions", "groups", "subscribers". */
void dray__registry_status(dray__registry *registry, json_t *object);

#endif
