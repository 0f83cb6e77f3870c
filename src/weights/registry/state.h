/* The registry's own structures, shared by its files. */
#pragma once

#include "weights/registry/coverage.h"
#include "weights/registry/registry.h"
#include "weights/sums.h"

#include <stdbool.h>

#define DRAY__REGIONS_MAX 65536u

struct model;
struct gang;
struct group;
struct dray__reg_call;

struct stored_region {
    void *handle; /* NULL: not put */
    size_t handle_size;
    int fd; /* -1: none goes with it */
};

/* An UPDATE_BEGIN that waits. */
struct begin {
    void *ticket; /* NULL: none */
    dray__update_wish wish;
    dray__arena texts; /* the wish's */
    int64_t deadline_ns;
};

/* What a rank read, what a checkpoint says of itself (rank 0), what lies in its memory now. */
struct vote {
    dray__sums read, expected, resident;
    uint8_t held; /* enum dray__held */
};

/* One opened publisher or subscriber: exactly one of gang and group is set. */
struct registrant {
    struct registrant *next;
    uint64_t key, member, host, token;
    int64_t pid;
    char *name, *endpoint;
    struct model *model;
    struct gang *gang;
    struct group *group;
    uint32_t rank;
    void *layout;
    size_t layout_size;
    /* publishers */
    struct stored_region *regions;
    uint32_t region_count, regions_missing;
    uint64_t slot_bytes; /* of its staging arena, the last region; 0: it has none */
    bool released;       /* and not said anew */
    bool pinned;         /* weights of it lie in pinned host memory */
    uint64_t published;
    bool has_published;
    dray__rank_claim claim; /* without its sums */
    dray__sums_forms forms; /* of checksums that came from it */
    /* subscribers */
    struct begin begin;
    bool shared; /* every region can be reached by other processes */
    void *vote_ticket;
    bool writing, voted;
    struct vote vote; /* what it voted, until all have */
};

/* Ranks that belong together, under an id that changes when any of them does. */
struct set {
    uint64_t id;
    uint64_t memory; /* of groups: by which others know their memory; changes when that moves */
    uint32_t world, present;
    struct registrant **entries;
};

/* Sums of one rank. */
struct summed_part {
    dray__sums sums;
    bool given;
};

struct version {
    struct version *next;
    uint64_t number;
    uint32_t published; /* ranks that did */
    uint32_t readers;   /* groups that hold a lease */
    bool withdrawn, unchecked;
    bool failed;               /* its sums could not be taken */
    uint64_t last;             /* the member that published it last */
    struct summed_part *parts; /* of the ranks, by rank, until those of all are there */
    uint32_t world, summed;    /* ranks whose sums are there */
    dray__sums sums;           /* of all of them, then */
    uint32_t dropped;
    char dropped_names[256];
};

/* The ranks of a publisher that opened together. */
struct gang {
    struct gang *next;
    struct model *model;
    struct set set;
    uint64_t incarnation; /* 0: still forming */
    uint64_t claimed;     /* the one that its ranks had before a restart; 0: a new one */
    uint64_t claimed_set;
    bool broken;
    char reason[256];         /* why it is broken */
    struct version *versions; /* newest first */
    struct delivered *delivered;
};

/* The newest version of a gang that a group of that name has committed, also one that is gone. */
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
    dray__sums read;     /* what its ranks read */
    dray__sums resident; /* what lies in their memory, in their own names and dtypes */
    bool resident_known; /* by all ranks */
    bool complete;       /* all of what was published, compared end to end */
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
    bool decided; /* its state is this registry's, no longer what its ranks said when they came */
    uint32_t readers; /* groups that read this one's memory */
    /* the update in progress */
    enum attempt_phase phase;
    bool gathering, gathered; /* waits, or waited, for others to begin with it */
    uint64_t attempt;
    uint8_t purpose;
    struct gang *gang;       /* NULL: no publishers */
    struct version *reading; /* its lease */
    struct group *peer;      /* read instead: the lease is in its readers */
    struct holding goal;     /* filled by the ranks' votes */
    bool verify;
    dray__sums expected; /* what the checkpoint says of itself, by rank 0 */
    /* What the group holds of its publishers' tensors, for these two sets. */
    dray__coverage coverage;
    uint64_t coverage_source, coverage_group;
    /* the last one that was aborted */
    uint64_t aborted;
    dray_error abort_error;
    char *report; /* of the last update: JSON */
};

/* Ranks that once updated together; kept while all of them are there, for their next update. */
struct cohort {
    struct cohort *next;
    struct set set;
};

/* A request of an entry's that waits for what other requests bring. */
struct pending {
    struct pending *next;
    const struct pending_kind *kind;
    void *ticket; /* NULL: answered */
    struct registrant *entry;
    uint32_t revoked;          /* readers that were */
    uint64_t number;           /* of the version that it is about, */
    uint32_t count;            /* and the groups: `count` names, */
    const char *const *groups; /* NULL: any */
    dray__arena texts;         /* which they are in */
};

struct pending_kind {
    /* Is there nothing to wait for any more? */
    bool (*ready)(const dray__registry *r, const struct pending *p);
    void (*answer)(dray__registry *r, struct pending *p);
    /* At its deadline: ends what it waits for, so that it is answered, or refuses it. gone: nobody
     * hears the answer. */
    void (*expire)(dray__registry *r, struct pending *p, bool gone);
};

/* Memory of one entry that another has imported. */
struct pin {
    struct pin *next;
    struct registrant *reader;
    uint64_t owner, set; /* key; as the set was called then */
    uint64_t bytes;
    bool revoked;
};

/* An ENGINES_WATCH. */
struct watcher {
    struct watcher *next;
    void *ticket;
    uint64_t seen;
};

struct model {
    struct model *next;
    char *name;
    struct gang *gangs; /* newest first */
    struct group *groups;
    struct cohort *cohorts;
};

struct dray__registry {
    dray__registry_ops ops;
    uint64_t next_id, next_incarnation;
    uint64_t first_id, first_incarnation; /* smaller ones are of coordinators before */
    struct model *models;
    struct registrant *entries;
    struct pending *pending;
    struct watcher *watchers;
    struct pin *pins;
    uint64_t engines_hash, engines_sequence; /* of what watchers are told */
};

/* ---- state.c */
void dray__reg_reply(dray__registry *r, void *ticket, dray__writer *payload, int fd);
/* The same with fields alone. */
void dray__reg_answer(dray__registry *r, void *ticket, const dray__fields *of, const void *answer);
/* The same of one that has a list, malloc'ed, which is freed; NULL: out of memory. */
void dray__reg_answer_list(dray__registry *r, void *ticket, const dray__fields *of,
                           const void *answer, const void *items);
void dray__reg_refuse(dray__registry *r, void *ticket, const dray_error *error);
struct model *dray__reg_model(dray__registry *r, const char *name, bool make);
/* Takes the set's place `rank`; world is fixed by the first. */
int dray__reg_set_join(struct set *set, struct registrant *entry, uint32_t world, const char *what,
                       dray_error *error);
void dray__reg_set_leave(struct set *set, struct registrant *entry);
/* A request that is being carried out. */
typedef struct dray__reg_call {
    dray__registry *r;
    const dray__party *party;
    dray__reader *in;
    void *ticket;
    int fd;                   /* taken over by setting it to -1 */
    const char *name;         /* of the message */
    struct registrant *entry; /* whose key the request began with; NULL: it has none */
    dray__arena texts;        /* of the message; taken over by emptying it */
} dray__reg_call;

/* A message, its fields, and who carries it out: answers or keeps the ticket, or returns an error
 * for it. The first field of messages of an opened publisher or subscriber is its key. What may
 * follow the fields `handle` reads, and checks the end (dray__reg_finish). */
enum dray__side { DRAY__NOBODY, DRAY__EITHER, DRAY__PUBLISHER, DRAY__SUBSCRIBER };
typedef struct dray__reg_message {
    uint16_t type; /* 0: behind the last */
    enum dray__side side;
    bool more; /* may follow */
    const dray__fields *fields;
    int (*handle)(dray__reg_call *call, const void *message, dray_error *error);
} dray__reg_message;
extern const dray__reg_message dray__reg_update_messages[], dray__reg_pins_messages[];

/* Its layout, a copy, and as many regions, none of which is there yet, in the place of those
 * before. */
int dray__reg_lay_out(struct registrant *entry, uint32_t regions, const void *layout, size_t size,
                      dray_error *error);
int dray__reg_finish(const dray__reg_call *call, dray_error *error);
int dray__reg_entry(const dray__reg_call *call, uint64_t key, enum dray__side side,
                    struct registrant **out, dray_error *error);
int dray__reg_done(const dray__reg_call *call);
/* The ticket is answered at the latest after so long. */
void dray__reg_expire(dray__registry *r, void *ticket, int64_t timeout_ns);

/* ---- pending.c */
/* gang: all ranks of it are there. wait, deliver: readers are gone, groups have a version. release:
 * nobody has mapped the entry's memory. write, leave: nobody reads the group's. */
extern const struct pending_kind dray__reg_for_gang, dray__reg_for_readers, dray__reg_for_groups,
    dray__reg_for_pins, dray__reg_to_write, dray__reg_to_leave;
/* Answers the request of a call when its time has come. It is the first of its kind of the entry,
 * or DRAY_EBUSY. Takes p->texts over, also where it fails. */
int dray__reg_pend(dray__registry *r, const struct pending *p, int64_t timeout_ns,
                   dray_error *error);
/* Answers those that have nothing to wait for any more. */
void dray__reg_pending_settle(dray__registry *r);
/* true: the ticket was such a request; answered. */
bool dray__reg_pending_expired(dray__registry *r, void *ticket, bool gone);
/* Ends those of an entry with an error. kind NULL: any. */
void dray__reg_pending_refuse(dray__registry *r, const struct registrant *entry,
                              const struct pending_kind *kind, const dray_error *error);

/* ---- gang.c: publishers and their versions */
int dray__reg_gang_join(dray__registry *r, struct registrant *entry, uint32_t world,
                        dray__rank_claim *claim, dray_error *error);
void dray__reg_gang_leave(dray__registry *r, struct registrant *entry, const char *why);
void dray__reg_gang_complete(dray__registry *r, struct gang *gang); /* forms it when all is there */
/* Takes the sums over. */
int dray__reg_publish(dray__registry *r, struct registrant *entry, uint64_t number, uint8_t checked,
                      dray__sums *sums, dray_error *error);
/* The living gang's newest version that can be read; NULL. */
struct version *dray__reg_newest(const struct model *model, uint64_t min, struct gang **gang);
/* The newest version that was ever complete in the newest gang; for people. */
const struct version *dray__reg_latest(const struct model *model, const struct gang **gang);
bool dray__reg_ready(const struct gang *gang, const struct version *version);

/* ---- summed.c: sums of a version, which may come after it was announced */
/* Those of one rank, taken over. */
int dray__reg_take_sums(struct version *version, uint32_t rank, dray__sums *sums,
                        dray_error *error);
void dray__reg_parts_free(struct version *version);
/* PUBLISH_SUMS: the last of them decides the updates that wait for it. A verdict: they could not be
 * taken, and nobody may commit the version. */
int dray__reg_summed(dray__registry *r, const struct registrant *entry, uint64_t number,
                     const dray_error *verdict, dray__sums *sums, dray_error *error);
/* Are all there, or will there be none? */
bool dray__reg_is_summed(const struct version *version);
/* Is there something for the group to compare with that has not come yet? */
bool dray__reg_awaits_sums(const struct group *group);
/* At its deadline: which ranks have not said theirs. */
void dray__reg_unsummed(const struct group *group, dray_error *error);

/* ---- deliver.c: publishers that wait until groups have a version */
/* The group has committed what it holds now. */
void dray__reg_delivered(struct group *group);
/* How many of those that the request waits for have it; at the deadline, who has not. */
uint32_t dray__reg_arrived(const struct pending *p);
void dray__reg_missing(const struct pending *p, char *text, size_t capacity);
void dray__reg_delivered_free(struct gang *gang);

/* ---- cohort.c: groups that update together */
bool dray__reg_all_began(const struct group *group); /* and it does not update already */
void dray__reg_cohort_leave(struct model *model, const struct registrant *entry);
bool dray__reg_set_taken(const struct model *model, uint64_t id);
const struct set *dray__reg_cohort_set(const struct model *model, uint64_t id); /* NULL: none */
/* A group that could start: should it wait a moment for others? */
bool dray__reg_cohort_waits(dray__registry *r, struct group *group);
/* The deadline of an entry's begin: true when it was the moment that is over. */
bool dray__reg_cohort_gathered(dray__registry *r, struct registrant *entry);
/* Of groups that start together; NULL: there is nobody to share with. */
const struct set *dray__reg_cohort_make(dray__registry *r, struct model *model,
                                        struct group *const *groups, uint32_t count);

/* ---- group.c: subscribers and their updates */
int dray__reg_group_join(dray__registry *r, struct registrant *entry, const char *name,
                         uint32_t world, dray_error *error);
/* Some ranks came back after a restart, others did not yet: nobody knows what the group holds. */
bool dray__reg_group_returning(const struct group *group);
void dray__reg_group_leave(dray__registry *r, struct registrant *entry, const char *why);
/* Takes the begin over, also where it fails. */
int dray__reg_begin(dray__registry *r, struct registrant *entry, struct begin *begin,
                    dray_error *error);
/* May the rank ask whether it may write in this update? */
int dray__reg_may_write(const struct registrant *entry, uint64_t attempt, dray_error *error);
/* Takes the vote's sums over. */
int dray__reg_vote(dray__registry *r, struct registrant *entry, uint64_t attempt,
                   const dray_error *verdict, struct vote *vote, void *ticket, dray_error *error);
void dray__vote_free(struct vote *vote);
void dray__reg_prefetch_drop(struct registrant *entry);
dray__packed_layout *dray__reg_layouts(const struct set *set);
/* What the group holds of what the set's ranks hold; counted once for the same ranks. */
int dray__reg_cover(struct group *group, const struct set *sources, dray_error *error);
/* true: the ticket was a begin or a vote of the entry; answered. */
bool dray__reg_group_expired(dray__registry *r, struct registrant *entry, void *ticket, bool gone);
/* Commits or ends the update in progress once all ranks have voted and all sums are there. */
void dray__reg_decide(dray__registry *r, struct group *group);
/* Ends the update in progress: torn when a rank was writing. */
void dray__reg_abort(dray__registry *r, struct group *group, const dray_error *reason);
/* Starts the updates whose ranks and version are there. */
void dray__reg_groups_settle(dray__registry *r);

/* ---- peer.c: groups that read each other's memory, and the router's list */
/* A group that can be read instead of the publishers' version (NULL: they cannot be read; near:
 * they can be, here), and is the better choice. NULL: none. */
struct group *dray__reg_peer(struct group *group, uint64_t min, const struct gang *gang,
                             const struct version *version, bool near);
/* Are all ranks of both on one host? */
bool dray__reg_near(const struct group *group, const struct group *peer);
/* The rank may write. */
void dray__reg_grant_writing(struct registrant *entry);
/* Takes the memory of the group from all who read it. */
uint32_t dray__reg_revoke(dray__registry *r, struct group *group, int code, const char *why);
bool dray__reg_serving(const struct group *group);
int dray__reg_watch(dray__registry *r, uint64_t seen, int64_t timeout_ns, void *ticket,
                    dray_error *error);
void dray__reg_watchers_settle(dray__registry *r);
bool dray__reg_watch_expired(dray__registry *r, void *ticket);

/* ---- pins.c: who has mapped what */
int dray__reg_pin(dray__registry *r, struct registrant *reader, const struct registrant *owner,
                  uint64_t set, uint64_t bytes, dray_error *error);
bool dray__reg_pinned(const dray__registry *r, const struct registrant *owner);
void dray__reg_release_answer(dray__registry *r, const struct registrant *entry, void *ticket);
/* All of the entry's, on either side. */
void dray__reg_pins_forget(dray__registry *r, const struct registrant *entry);
/* By which readers know what they have imported of a set. */
uint64_t dray__reg_source_id(const struct set *sources);
/* Of ranks that voted so: their regions are elsewhere, and are to be put again. */
void dray__reg_rehouse(dray__registry *r, struct group *group);
/* gang.c: the versions that can no longer be read, and who still does. */
void dray__reg_gang_withdraw(const struct registrant *entry); /* those that have this rank's part */
void dray__reg_gang_drop_readers(dray__registry *r, struct gang *gang, uint64_t number);
bool dray__reg_gang_read(const struct gang *gang, uint64_t number); /* it, or an older one */
/* Answers who waited for readers of the version: who was dropped, which attempts may go on. */
void dray__reg_wait_answer(dray__registry *r, const struct registrant *entry, uint64_t number,
                           void *ticket);
