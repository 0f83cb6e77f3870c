/* The registry's own structures, shared by its files. */
#ifndef DRAY_CONTROL_REGISTRY_STATE_H
#define DRAY_CONTROL_REGISTRY_STATE_H

#include "control/coverage.h"
#include "control/registry.h"
#include "control/sums.h"

#include <stdbool.h>

#define DRAY__NAME_MAX 255u
#define DRAY__WORLD_MAX 65536u
#define DRAY__REGIONS_MAX 65536u

struct model;
struct gang;
struct group;

struct stored_region {
    void *handle;
    size_t handle_size;
    int fd; /* -1: not put */
};

/* An UPDATE_BEGIN that waits. */
struct begin {
    void *ticket; /* NULL: none */
    uint8_t mode;
    bool verify;
    uint64_t min_version, path_version;
    char *path;
};

/* One opened publisher or subscriber: exactly one of gang and group is set. */
struct entry {
    struct entry *next;
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
    uint64_t published;
    bool has_published;
    void *gang_ticket; /* UPDATE_SOURCES(GANG), kept until the gang is formed */
    /* subscribers */
    struct begin begin;
    void *vote_ticket;
    bool writing, voted;
};

/* Ranks that belong together, under an id that changes when any of them does. */
struct set {
    uint64_t id;
    uint32_t world, present;
    struct entry **entries;
};

struct version {
    struct version *next;
    uint64_t number;
    uint32_t published; /* ranks that did */
    uint32_t readers;   /* groups that hold a lease */
    bool withdrawn, unchecked;
    dray__sums sums;
    uint32_t dropped;
    char dropped_names[256];
};

/* The ranks of a publisher that opened together. */
struct gang {
    struct gang *next;
    struct model *model;
    struct set set;
    uint64_t incarnation; /* 0: still forming */
    bool broken;
    char reason[256];         /* why it is broken */
    struct version *versions; /* newest first */
};

enum attempt_phase { ATTEMPT_NONE, ATTEMPT_MOVING };

struct group {
    struct group *next;
    struct model *model;
    char *name;
    struct set set;
    uint64_t epoch;
    int state; /* dray_group_state's values */
    uint64_t version, incarnation;
    /* the update in progress */
    enum attempt_phase phase;
    uint64_t attempt;
    uint8_t mode;
    struct gang *gang;       /* NULL: disk */
    struct version *reading; /* its lease */
    uint64_t goal;           /* version number */
    bool verify;
    dray__sums sums;         /* of the ranks that voted */
    dray__sums expected;     /* what the checkpoint says of itself, by rank 0 */
    dray__compared compared; /* in the end */
    /* What the group holds of its publishers' tensors, for these two sets. */
    dray__coverage coverage;
    uint64_t coverage_source, coverage_group;
    /* the last one that was aborted */
    uint64_t aborted;
    dray_error abort_error;
    dray__sums committed; /* sums of the version that the group holds */
    char *report;         /* of the last update: JSON */
};

/* A PUBLISHER_WAIT. */
struct wait {
    struct wait *next;
    void *ticket;
    struct entry *entry;
    uint64_t number;
};

struct model {
    struct model *next;
    char *name;
    struct gang *gangs; /* newest first */
    struct group *groups;
};

struct dray__registry {
    dray__registry_ops ops;
    uint64_t next_id, next_incarnation;
    struct model *models;
    struct entry *entries;
    struct wait *waits;
};

/* ---- registry_state.c */
void dray__reg_reply(dray__registry *r, void *ticket, dray__writer *payload, int fd);
void dray__reg_refuse(dray__registry *r, void *ticket, const dray_error *error);
struct model *dray__reg_model(dray__registry *r, const char *name, bool make);
/* Takes the set's place `rank`; world is fixed by the first. */
int dray__reg_set_join(struct set *set, struct entry *entry, uint32_t world, const char *what,
                       dray_error *error);
void dray__reg_set_leave(struct set *set, struct entry *entry);

/* ---- registry_gang.c: publishers and their versions */
int dray__reg_gang_join(dray__registry *r, struct entry *entry, uint32_t world, dray_error *error);
void dray__reg_gang_leave(dray__registry *r, struct entry *entry, const char *why);
void dray__reg_gang_complete(dray__registry *r, struct gang *gang); /* forms it when all is there */
void dray__reg_gang_answer(dray__registry *r, struct entry *entry);
int dray__reg_publish(dray__registry *r, struct entry *entry, uint64_t number, bool checked,
                      const dray__sums *sums, dray_error *error);
int dray__reg_wait(dray__registry *r, struct entry *entry, uint64_t number, int64_t timeout_ns,
                   void *ticket, dray_error *error);
/* true: the ticket was a PUBLISHER_WAIT; answered. */
bool dray__reg_wait_expired(dray__registry *r, void *ticket);
/* Answers the waits that have nothing to wait for any more. */
void dray__reg_waits_settle(dray__registry *r);
/* The living gang's newest version that can be read; NULL. */
struct version *dray__reg_newest(const struct model *model, uint64_t min, struct gang **gang);
/* The newest version that was ever complete in the newest gang; for people. */
const struct version *dray__reg_latest(const struct model *model, const struct gang **gang);
bool dray__reg_ready(const struct gang *gang, const struct version *version);
void dray__reg_gang_free(dray__registry *r, struct gang *gang);

/* ---- registry_group.c: subscribers and their updates */
int dray__reg_group_join(dray__registry *r, struct entry *entry, const char *name, uint32_t world,
                         dray_error *error);
void dray__reg_group_leave(dray__registry *r, struct entry *entry, const char *why);
int dray__reg_begin(dray__registry *r, struct entry *entry, const struct begin *begin,
                    dray_error *error);
int dray__reg_writing(dray__registry *r, struct entry *entry, uint64_t attempt, dray_error *error);
int dray__reg_vote(dray__registry *r, struct entry *entry, uint64_t attempt,
                   const dray_error *verdict, const dray__sums *sums, const dray__sums *expected,
                   void *ticket, dray_error *error);
/* true: the ticket was a begin or a vote of the entry; answered. */
bool dray__reg_group_expired(dray__registry *r, struct entry *entry, void *ticket, bool gone);
/* Ends the update in progress: torn when a rank was writing. */
void dray__reg_abort(dray__registry *r, struct group *group, const dray_error *reason);
/* Starts the updates whose ranks and version are there. */
void dray__reg_groups_settle(dray__registry *r);
void dray__reg_group_free(struct group *group);

#endif
