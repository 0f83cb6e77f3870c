/* src/weights/update/: the engine's end of an update. A subscriber is one rank of a group that
 * holds the same model (subscriber.c). update.c is an update as a state machine that never waits:
 * it begins, plans, reaches the sources, asks whether it may overwrite, moves and votes. stage.c
 * keeps the next version beside the one that is served, report.c reports how an update went, and
 * engines.c is for routers. */

/* An engine rank and its update in progress; shared by subscriber.c and update.c. */
#pragma once

#include "base/thread.h"
#include "base/waker.h"
#include "weights/internal.h"
#include "weights/registry/registry.h"
#include "weights/update/exchange.h"
#include "weights/update/steps.h"

#include <jansson.h>

enum update_phase {
    PHASE_IDLE,
    PHASE_BEGIN,  /* the coordinator was asked for a version */
    PHASE_PLAN,   /* layouts and copies */
    PHASE_IMPORT, /* regions, staging */
    PHASE_ASK,    /* the coordinator was told that bytes will be overwritten */
    PHASE_MOVE,
    PHASE_VOTE, /* waiting for the group's decision */
    PHASE_DONE
};

struct dray_subscriber {
    dray_context *context;
    dray__channel *channel;
    bool left;          /* its regions are to be offered again */
    bool interrupted;   /* the current update ends as if its deadline had passed */
    bool channel_stuck; /* a request was sent whose answer was not read */
    dray__destination destination;
    uint64_t key, token;
    bool local;              /* known to this process's data server */
    struct dray__load *load; /* NULL when the destination has memory */
    char *model, *group;
    int64_t timeout_ns;
    dray__waker waker;
    int event_fd;
    /* The fields that this rank registers at the next coordinator when the session continues
     * there. */
    dray__writer packed; /* the layout */
    uint64_t returns;    /* the context's number of returns when this rank registered */
    int32_t state, mode; /* state: dray_group_state as far as this rank knows */
    uint64_t version, incarnation;
    bool event_set;

    dray__sources *live, *disk; /* the plans of the last update from publishers and from disk */
    uint64_t *block_sums;       /* the sums of the version that this rank holds; NULL when
                                 * unknown */
    dray__sums_form *read_form, *resident_form; /* the forms of the last vote's sums */
    dray__sums_forms sent;
    /* The version that this rank's memory holds as a whole. incarnation 0: none, or that of a
     * checkpoint. */
    uint64_t held_incarnation, held_version;
    uint64_t held_content; /* the number of the memory's content since (dray__region_content) */
    uint64_t held_disk;    /* the sums of the checkpoint that is held as a whole; 0 when unknown */

    /* The prefetched version. staging: regions like the destination's; NULL until the first
     * prefetch. */
    int32_t stage_kind; /* as in dray_subscriber_options */
    dray_region **staging;
    dray__sources *staged; /* the staging as the source of a commit; it owns the regions */
    uint64_t staging_bytes, *staged_sums;
    /* The version that the staging holds as a whole, also after its commit (has_staged: it waits
     * for that). incarnation 0: none, or that of a checkpoint. */
    uint64_t staged_version, staged_incarnation;
    bool has_staged;
    bool spare_is_old; /* an exchange has put an older version into the chunks that it exchanged */
    bool refills; /* the current prefetch copies the engine's memory into the spare one first */
    uint64_t refilled;        /* bytes */
    int64_t refill_due_ns;    /* when the next piece may be copied */
    dray__exchange *exchange; /* NULL when a commit copies everything */
    bool exchanges;           /* the current commit exchanges memory, */
    bool exchanged;           /* and has done so */
    dray__thread after;       /* runs after an exchange; until it is joined, it alone may use the
                                 subscriber */
    int after_rc;             /* the result of that thread */

    /* the update in progress */
    enum dray__purpose purpose;
    uint8_t source; /* dray__source_kind */
    bool retried, granted;
    dray_error first_error;   /* before the retry */
    dray__destination target; /* the destination, or its staging */
    enum update_phase phase;
    dray_update_options options;
    char *path;
    int64_t deadline_ns, started_ns, mark_ns;
    int64_t answer_by_ns; /* the deadline of the request that has no answer yet */
    int64_t pause_ns; /* from then on the engine's memory may change, or it waits for a commit */
    uint64_t attempt, source_set, group_set;
    uint32_t source_count, cohort_count;
    uint64_t cohort_set, run, last; /* last: the member that published last */
    dray__map partial; /* tensors that the group holds in part, and therefore does not compare */
    bool *compared;    /* [tensor]: its sums are compared; NULL when no tensor's are */
    bool announced, writing, failed, moved_any;
    dray__sources *sources; /* live, disk or staged */
    dray__transfer *transfer;
    dray_update_report report;
    dray__steps steps;  /* the engine's decoding steps, noted by any thread */
    dray_error outcome; /* code 0: committed */
};

/* Connects again if the connection broke. When the session continues at another coordinator,
 * registers there with the same ids. */
int dray__subscriber_ensure(dray_subscriber *subscriber, int64_t deadline_ns, dray_error *error);
/* report.c. Returns the report as an object; NULL when out of memory. */
json_t *dray__report_object(const dray_update_report *report);
/* Returns the object as one line, and frees the object. NULL when out of memory. */
char *dray__report_text(json_t *object);
/* Finds the sources of the update, and the tensors that are compared. Returns DRAY_EAGAIN until the
 * coordinator has answered. */
int dray__update_plan(dray_subscriber *subscriber, dray_error *error);
/* Frees everything that belongs to the update except its outcome. */
void dray__update_release(dray_subscriber *subscriber);
/* Makes the poll descriptor readable (ready), or not readable. */
void dray__subscriber_signal(dray_subscriber *subscriber, bool ready);

/* stage.c. Allocates the staging, once. */
int dray__stage_open(dray_subscriber *subscriber, dray_error *error);
void dray__stage_drop(dray_subscriber *subscriber);
static inline uint64_t dray__nccl_bytes(const dray_subscriber *s)
{
    return s->options.nccl_bytes ? s->options.nccl_bytes : DRAY__NCCL_DEFAULT;
}

/* Returns true when a delta is likely, and the staging holds the version that the engine has, or
 * can get it by a copy within the GPU (s->refills), so that the delta can be applied there. */
bool dray__stage_has_base(dray_subscriber *subscriber);
/* Makes a part of that copy. Returns DRAY_EAGAIN while more is left. */
int dray__stage_refill(dray_subscriber *subscriber, dray_error *error);
/* Begins to move the prefetched version to the destination. */
int dray__stage_commit(dray_subscriber *subscriber, dray_error *error);
/* Exchanges the memory of this commit. A second call undoes the first. */
int dray__stage_exchange(dray_subscriber *subscriber, dray_error *error);
/* Called when the commit is decided. Starts the thread that does the rest of an exchange, so that
 * the engine need not wait for it. */
void dray__stage_after(dray_subscriber *subscriber);
/* Waits for that thread. Call it before the subscriber is used for anything else. */
void dray__stage_join(dray_subscriber *subscriber);
/* subscriber.c. Offers this rank's regions to other members. */
int dray__subscriber_put(dray_subscriber *subscriber, int64_t deadline_ns, dray_error *error);
/* Offers them again if they were withdrawn, or their memory was released. A failure is for the log,
 * because this rank itself needs no offer. */
void dray__subscriber_put_again(dray_subscriber *subscriber, int64_t deadline_ns);
