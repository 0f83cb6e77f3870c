/* The registry's structures, and the functions that its files call of each other. An entry is one
 * opened publisher or subscriber. `dray__reg_` functions that take an `error` return DRAY_OK or the
 * code of the error. */
#pragma once

#include "weights/registry/coverage.h"
#include "weights/registry/registry.h"
#include "weights/sums.h"

#include <stdbool.h>

#define DRAY__REGIONS_MAX 65536u

struct model;
struct trainer;
struct group;
struct dray__reg_call;

struct stored_region {
    void *handle; /* NULL until the publisher has sent it */
    size_t handle_size;
    int fd; /* the descriptor that belongs to the handle; -1: none */
};

/* A rank's UPDATE_BEGIN that has no answer yet. */
struct begin {
    void *ticket; /* NULL when there is no such request */
    dray__update_wish wish;
    dray__arena texts; /* the strings of the wish */
    int64_t deadline_ns;
};

/* The sums that a rank votes with at the end of an update. */
struct vote {
    dray__sums read;     /* of the elements that it read */
    dray__sums expected; /* those that a checkpoint's file states; rank 0 sends them */
    dray__sums resident; /* of the elements in its memory now */
    uint8_t held;        /* enum dray__held */
};

/* One opened publisher or subscriber: exactly one of trainer and group is set. */
struct registrant {
    struct registrant *next;
    uint64_t key, member, host, token;
    int64_t pid;
    char *name, *endpoint;
    struct model *model;
    struct trainer *trainer;
    struct group *group;
    uint32_t rank;
    void *layout;
    size_t layout_size;
    /* publishers */
    struct stored_region *regions;
    uint32_t region_count, regions_missing;
    uint64_t slot_bytes; /* the size of its staging arena, the last region; 0 when it has none */
    bool released;       /* it released its regions and has not sent new ones */
    bool pinned;         /* some of its weights are in pinned host memory */
    uint64_t published;
    bool has_published;
    dray__rank_claim claim; /* the state with which it registered, without the sums */
    dray__sums_forms forms; /* the forms of checksums that it has sent */
    /* subscribers */
    struct begin begin;
    bool shared; /* every region can be reached by other processes */
    void *vote_ticket;
    bool writing, voted;
    struct vote vote; /* its vote, kept until all ranks have voted */
};

/* Ranks that belong together. The id changes when one of them is replaced. */
struct set {
    uint64_t id;
    uint64_t memory; /* of groups: the id of their memory for readers; it changes when a rank's
                        memory moves */
    uint32_t world, present;
    struct registrant **entries;
};

/* The sums of one rank. */
struct summed_part {
    dray__sums sums;
    bool given; /* the rank has sent them */
};

struct version {
    struct version *next;
    uint64_t number;
    uint32_t published; /* the number of ranks that have published it */
    uint32_t readers;   /* the number of groups that hold a lease on it */
    bool withdrawn, unchecked;
    bool failed;               /* a rank could not compute its sums */
    uint64_t last;             /* the member that published it last */
    struct summed_part *parts; /* [rank], until the sums of all ranks are there */
    uint32_t world, summed;    /* summed: the number of ranks whose sums are there */
    dray__sums sums;           /* of all ranks, once they are there */
    uint32_t dropped;          /* groups whose lease ended before they had read it */
    char dropped_names[256];   /* the names of these groups */
};

/* A trainer: the ranks of a publisher that opened together. */
struct trainer {
    struct trainer *next;
    struct model *model;
    struct set set;
    uint64_t incarnation;     /* 0 while some of its ranks have not registered */
    uint64_t claimed;         /* the incarnation that its ranks had before the coordinator was
                               * restarted; 0 when they are new */
    uint64_t claimed_set;     /* the largest id of their set that they knew then */
    bool broken;              /* a rank has left */
    char reason[256];         /* which rank left, and why */
    struct version *versions; /* newest first */
    struct delivered *delivered;
};

/* The newest version of a trainer that a group of that name has committed. It is kept after the
 * group has ended. */
struct delivered {
    struct delivered *next;
    char *group;
    uint64_t version;
};

enum attempt_phase { ATTEMPT_NONE, ATTEMPT_MOVING };

/* A version as a group holds it. */
struct holding {
    uint64_t version, incarnation;
    uint8_t mode;
    dray__sums read;     /* of the elements that its ranks read */
    dray__sums resident; /* of the elements in their memory, under their own names and dtypes */
    bool resident_known; /* all ranks sent their resident sums */
    bool complete;       /* the group holds everything that was published, compared end to end */
    dray__compared compared;
};

struct group {
    struct group *next;
    struct model *model;
    char *name;
    struct set set;
    uint64_t epoch;
    int state; /* dray_group_state's values */
    struct holding now;
    struct holding staged; /* prefetched */
    bool has_staged;
    bool leaving;
    bool decided;     /* `state` was decided by this registry; false: it is the state that ranks
                         stated when they registered again */
    uint32_t readers; /* the number of groups that read this one's memory */
    /* the update in progress */
    enum attempt_phase phase;
    bool gathering, gathered; /* it waits, or has waited, for other groups to begin with it */
    uint64_t attempt;
    uint8_t purpose;
    struct trainer *trainer; /* the publishers of the version that is read; NULL when there are
                              * none */
    struct version *reading; /* the version that the group has a lease on */
    struct group *peer;      /* the group that is read instead; its `readers` count the lease */
    struct holding goal;     /* the state after the commit; the ranks' votes fill it */
    bool verify;
    dray__sums expected; /* the sums that the checkpoint's file states, sent by rank 0 */
    /* Which elements of the publishers' tensors the group holds. Valid for these two sets. */
    dray__coverage coverage;
    uint64_t coverage_source, coverage_group;
    /* the last attempt that was aborted */
    uint64_t aborted;
    dray_error abort_error;
    char *report; /* the report of the last update, as JSON */
};

/* Ranks that updated together before. They are kept for their next update while all of them are
 * registered. */
struct cohort {
    struct cohort *next;
    struct set set;
};

/* A request of an entry that is answered after other requests have arrived. */
struct pending {
    struct pending *next;
    const struct pending_kind *kind;
    void *ticket; /* NULL when it was answered */
    struct registrant *entry;
    uint32_t revoked;          /* the number of readers whose lease it ended */
    uint64_t number;           /* the version that it waits for */
    const char *const *groups; /* the names of the groups that it waits for; NULL for any */
    uint32_t count;            /* the number of these names */
    dray__arena texts;         /* the memory of these names */
};

struct pending_kind {
    /* Returns true when the request can be answered. */
    bool (*ready)(const dray__registry *r, const struct pending *p);
    void (*answer)(dray__registry *r, struct pending *p);
    /* Called at the request's deadline. It revokes the leases that the request waits for, so that
     * the request can be answered, or it refuses the request. gone: the member that asked is no
     * longer connected. */
    void (*expire)(dray__registry *r, struct pending *p, bool gone);
};

/* Memory of one entry that another entry has imported. */
struct pin {
    struct pin *next;
    struct registrant *reader;
    uint64_t owner; /* the key of the entry that owns the memory */
    uint64_t set;   /* the id of the owner's set when the memory was imported */
    uint64_t bytes;
    bool revoked; /* the owner has asked for the memory back */
};

/* An ENGINES_WATCH that has no answer yet. */
struct watcher {
    struct watcher *next;
    void *ticket;
    uint64_t seen; /* the sequence number of the list that the watcher has */
};

struct model {
    struct model *next;
    char *name;
    struct trainer *trainers; /* newest first */
    struct group *groups;
    struct cohort *cohorts;
};

struct dray__registry {
    dray__registry_ops ops;
    uint64_t next_id, next_incarnation;
    uint64_t first_id, first_incarnation; /* smaller ones were given by earlier coordinators */
    struct model *models;
    struct registrant *entries;
    struct pending *pending;
    struct watcher *watchers;
    struct pin *pins;
    uint64_t engines_hash, engines_sequence; /* of the list of engines that watchers got last */
};

/* ---- state.c */
/* Answers a ticket. Takes over the payload and the descriptor (-1: none). */
void dray__reg_reply(dray__registry *r, void *ticket, dray__writer *payload, int fd);
/* Answers a ticket with a message of these fields. */
void dray__reg_answer(dray__registry *r, void *ticket, const dray__fields *of, const void *answer);
/* Answers a ticket with a message that has a list. The list was allocated by malloc and is freed
 * here; NULL when there was no memory for it. */
void dray__reg_answer_list(dray__registry *r, void *ticket, const dray__fields *of,
                           const void *answer, const void *items);
void dray__reg_refuse(dray__registry *r, void *ticket, const dray_error *error);
struct model *dray__reg_model(dray__registry *r, const char *name, bool make);
/* Puts the entry into the set as its rank. The first entry fixes the set's world. `what` names the
 * kind of set in errors. */
int dray__reg_set_join(struct set *set, struct registrant *entry, uint32_t world, const char *what,
                       dray_error *error);
void dray__reg_set_leave(struct set *set, struct registrant *entry);
/* A request that is being carried out. */
typedef struct dray__reg_call {
    dray__registry *r;
    const dray__party *party;
    dray__reader *in;
    void *ticket;
    int fd;                   /* a handler that takes it over sets it to -1 */
    const char *name;         /* the name of the message */
    struct registrant *entry; /* the entry whose key is the first field; NULL when there is no
                               * key */
    dray__arena texts;        /* strings of the message; a handler that keeps them empties it */
} dray__reg_call;

/* A message, its fields, and its handler. The handler answers the ticket, keeps it, or returns an
 * error for it. The first field of the messages of an entry is its key. If `more` is set, the
 * handler reads the bytes behind the fields and checks their end (dray__reg_finish). */
enum dray__side { DRAY__NOBODY, DRAY__EITHER, DRAY__PUBLISHER, DRAY__SUBSCRIBER };
typedef struct dray__reg_message {
    uint16_t type;        /* 0 at the end of the table */
    enum dray__side side; /* the kind of entry whose message it is */
    bool more;            /* bytes may follow the fields */
    const dray__fields *fields;
    int (*handle)(dray__reg_call *call, const void *message, dray_error *error);
} dray__reg_message;
extern const dray__reg_message dray__reg_update_messages[], dray__reg_pins_messages[];

/* Replaces the entry's layout by a copy of this one, and its regions by `regions` ones that were
 * not sent yet. */
int dray__reg_lay_out(struct registrant *entry, uint32_t regions, const void *layout, size_t size,
                      dray_error *error);
int dray__reg_finish(const dray__reg_call *call, dray_error *error);
int dray__reg_entry(const dray__reg_call *call, uint64_t key, enum dray__side side,
                    struct registrant **out, dray_error *error);
int dray__reg_done(const dray__reg_call *call);
/* Has the ticket answered after timeout_ns at the latest. */
void dray__reg_expire(dray__registry *r, void *ticket, int64_t timeout_ns);

/* ---- pending.c */
/* for_trainer waits until all ranks of a trainer have registered; for_readers until a version has
 * no readers; for_groups until groups have a version; for_pins until no other entry has the entry's
 * memory mapped; to_write and to_leave until no group reads this group's memory. */
extern const struct pending_kind dray__reg_for_trainer, dray__reg_for_readers, dray__reg_for_groups,
    dray__reg_for_pins, dray__reg_to_write, dray__reg_to_leave;
/* Keeps a request until it can be answered. Fails with DRAY_EBUSY when the entry has a request of
 * that kind already. Takes over p->texts, also when it fails. */
int dray__reg_pend(dray__registry *r, const struct pending *p, int64_t timeout_ns,
                   dray_error *error);
/* Answers the requests that are ready. */
void dray__reg_pending_settle(dray__registry *r);
/* Answers the ticket if it is that of a kept request, and then returns true. */
bool dray__reg_pending_expired(dray__registry *r, void *ticket, bool gone);
/* Answers an entry's requests of a kind (NULL: of all kinds) with an error. */
void dray__reg_pending_refuse(dray__registry *r, const struct registrant *entry,
                              const struct pending_kind *kind, const dray_error *error);

/* ---- trainer.c: publishers and their versions */
int dray__reg_trainer_join(dray__registry *r, struct registrant *entry, uint32_t world,
                           dray__rank_claim *claim, dray_error *error);
void dray__reg_trainer_leave(dray__registry *r, struct registrant *entry, const char *why);
/* Gives the trainer its incarnation once all its ranks and their regions are there. */
void dray__reg_trainer_complete(dray__registry *r, struct trainer *trainer);
/* Records that the rank published a version. Takes over the sums. */
int dray__reg_publish(dray__registry *r, struct registrant *entry, uint64_t number, uint8_t checked,
                      dray__sums *sums, dray_error *error);
/* Returns the newest version from `min` on that can be read, and its trainer, or NULL. */
struct version *dray__reg_newest(const struct model *model, uint64_t min, struct trainer **trainer);
/* Returns the newest version of the newest trainer that all its ranks published, for status
 * reports.
 */
const struct version *dray__reg_latest(const struct model *model, const struct trainer **trainer);
/* Fills the error of an update without a version from `min` on: it was withdrawn, or what there is
 * of the model instead. */
void dray__reg_no_version(const dray__registry *r, const struct group *group, uint64_t min,
                          dray_error *error);
bool dray__reg_ready(const struct trainer *trainer, const struct version *version);

/* ---- summed.c: the sums of a version, which may arrive after its announcement */
/* Records the sums of one rank, and takes them over. */
int dray__reg_take_sums(struct version *version, uint32_t rank, dray__sums *sums,
                        dray_error *error);
void dray__reg_parts_free(struct version *version);
/* Handles PUBLISH_SUMS. When the sums of the last rank arrive, the updates that wait for them are
 * decided. verdict is the error with which the rank failed to compute its sums; then no group may
 * commit the version. It is NULL when the sums are there. */
int dray__reg_summed(dray__registry *r, const struct registrant *entry, uint64_t number,
                     const dray_error *verdict, dray__sums *sums, dray_error *error);
/* Returns true when the sums of all ranks are there, or the version has none. */
bool dray__reg_is_summed(const struct version *version);
/* Returns true when the group's update needs sums that have not arrived yet. */
bool dray__reg_awaits_sums(const struct group *group);
/* Fills the error with the ranks that have not sent their sums by the deadline. */
void dray__reg_unsummed(const struct group *group, dray_error *error);

/* ---- deliver.c: publishers that wait until groups have a version */
/* Records that the group has committed the version that it holds now. */
void dray__reg_delivered(struct group *group);
/* Returns the number of groups with the version among those that the request waits for. */
uint32_t dray__reg_arrived(const struct pending *p);
/* Writes the names of the groups without the version. */
void dray__reg_missing(const struct pending *p, char *text, size_t capacity);
void dray__reg_delivered_free(struct trainer *trainer);

/* ---- cohort.c: groups that update together */
/* Returns true when all ranks of the group wait in UPDATE_BEGIN, and no update is in progress. */
bool dray__reg_all_began(const struct group *group);
/* Forgets the cohorts that the entry is a rank of. */
void dray__reg_cohort_leave(struct model *model, const struct registrant *entry);
/* Returns true when a trainer, a group or a cohort has this id. */
bool dray__reg_set_taken(const struct model *model, uint64_t id);
const struct set *dray__reg_cohort_set(const struct model *model, uint64_t id); /* NULL when there
                                                                                 * is none */
/* Called for a group that could start. Returns true when it should wait some milliseconds, because
 * other groups may begin then and share the transfer. */
bool dray__reg_cohort_waits(dray__registry *r, struct group *group);
/* Called when the ticket of an entry's begin expires. Returns true when this ends the wait for
 * other groups, and not the begin itself. */
bool dray__reg_cohort_gathered(dray__registry *r, struct registrant *entry);
/* Returns the set of all ranks of groups that start together, or NULL when they cannot share. */
const struct set *dray__reg_cohort_make(dray__registry *r, struct model *model,
                                        struct group *const *groups, uint32_t count);

/* ---- group.c: subscribers and their updates */
int dray__reg_group_join(dray__registry *r, struct registrant *entry, const char *name,
                         uint32_t world, dray_error *error);
/* Returns true when some ranks have registered again after a restart of the coordinator and others
 * have not. The group's version is unknown until then. */
bool dray__reg_group_returning(const struct group *group);
void dray__reg_group_leave(dray__registry *r, struct registrant *entry, const char *why);
/* Takes over the begin, also when it fails. */
int dray__reg_begin(dray__registry *r, struct registrant *entry, struct begin *begin,
                    dray_error *error);
/* Checks that the entry's group is in this attempt, and that the rank has not voted in it. */
int dray__reg_may_write(const struct registrant *entry, uint64_t attempt, dray_error *error);
/* Records the rank's vote, and takes over its sums. */
int dray__reg_vote(dray__registry *r, struct registrant *entry, uint64_t attempt,
                   const dray_error *verdict, struct vote *vote, void *ticket, dray_error *error);
void dray__vote_free(struct vote *vote);
void dray__reg_prefetch_drop(struct registrant *entry);
dray__packed_layout *dray__reg_layouts(const struct set *set);
/* Computes group->coverage against the layouts of `sources`, unless it is that of the same ranks
 * already. */
int dray__reg_cover(struct group *group, const struct set *sources, dray_error *error);
/* Answers the ticket if it is a begin or a vote of the entry, and then returns true. */
bool dray__reg_group_expired(dray__registry *r, struct registrant *entry, void *ticket, bool gone);
/* Commits or ends the update in progress once all ranks have voted and all sums are there. */
void dray__reg_decide(dray__registry *r, struct group *group);
/* Ends the update in progress. The group is torn if a rank was writing. */
void dray__reg_abort(dray__registry *r, struct group *group, const dray_error *reason);
/* Starts the updates whose ranks have all begun and whose version can be read. */
void dray__reg_groups_settle(dray__registry *r);

/* ---- peer.c: groups that read each other's memory, and the router's list */
/* Returns a group whose memory is the better source for an update of `group` than the publishers,
 * or NULL. version is the publishers' version that could be read, or NULL. near is true when all
 * publishers of it are on the group's host. */
struct group *dray__reg_peer(struct group *group, uint64_t min, const struct trainer *trainer,
                             const struct version *version, bool near);
/* Returns true when all ranks of both groups are on one host. */
bool dray__reg_near(const struct group *group, const struct group *peer);
/* Lets the rank write to its memory. */
void dray__reg_grant_writing(struct registrant *entry);
/* Ends the updates of all groups that read this group's memory, and returns their number. */
uint32_t dray__reg_revoke(dray__registry *r, struct group *group, int code, const char *why);
/* Returns true when the group holds a whole version and no rank is writing. */
bool dray__reg_serving(const struct group *group);
int dray__reg_watch(dray__registry *r, uint64_t seen, int64_t timeout_ns, void *ticket,
                    dray_error *error);
void dray__reg_watchers_settle(dray__registry *r);
bool dray__reg_watch_expired(dray__registry *r, void *ticket);

/* ---- pins.c: the memory of entries that other entries have imported */
int dray__reg_pin(dray__registry *r, struct registrant *reader, const struct registrant *owner,
                  uint64_t set, uint64_t bytes, dray_error *error);
bool dray__reg_pinned(const dray__registry *r, const struct registrant *owner);
void dray__reg_release_answer(dray__registry *r, const struct registrant *entry, void *ticket);
/* Forgets the pins of which the entry is the reader or the owner. */
void dray__reg_pins_forget(dray__registry *r, const struct registrant *entry);
/* Returns the id under which readers keep the memory that they imported of a set. */
uint64_t dray__reg_source_id(const struct set *sources);
/* Voids the regions of the ranks that voted that their memory has moved. The ranks send new ones.
 */
void dray__reg_rehouse(dray__registry *r, struct group *group);
/* Voids the regions of a subscriber's rank, whose memory may be released. The rank sends them again
 * before its next update. */
void dray__reg_unhouse(dray__registry *r, struct registrant *entry);

/* ---- trainer.c: the end of versions */
/* Withdraws the versions that this rank has published. */
void dray__reg_trainer_withdraw(const struct registrant *entry);
/* Ends the leases of all readers of the versions up to this one. */
void dray__reg_trainer_drop_readers(dray__registry *r, struct trainer *trainer, uint64_t number);
/* Returns true when the version, or an older one, has readers. */
bool dray__reg_trainer_read(const struct trainer *trainer, uint64_t number);
/* Answers a request that waited for the readers of the version: with the groups that were dropped,
 * and the attempts that may go on. */
void dray__reg_wait_answer(dray__registry *r, const struct registrant *entry, uint64_t number,
                           void *ticket);
