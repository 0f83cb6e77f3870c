/* src/weights/publish/: the trainer's end of an update. A publisher registers its blocks,
 * announces each version before the bytes are there (publisher_fence.c), sums it while readers
 * begin (publisher_sums.c), and waits for both before the trainer writes again, on the host or on a
 * stream of a GPU (gate.c). publisher_deliver.c waits until groups have committed a version;
 * publisher_move.c is for memory that moves or is taken back. */

/* A publisher as the files that make it up see it. */
#pragma once

#include "weights/delta/delta.h"
#include "weights/mark.h"
#include "weights/publish/gate.h"
#include "weights/registry/registry.h"
#include "weights/server/arena.h"
#include "weights/source_sums.h"

/* The sums of the version that was announced last (publisher_sums.c). */
typedef struct dray__summing_up {
    dray__thread thread;
    pthread_mutex_t lock;
    pthread_cond_t is_done;
    bool done; /* with the lock */
    atomic_bool closing;
    dray__patience patience;
    uint64_t version;
    dray__sums_form *form; /* they will probably be of */
    dray_error outcome;
} dray__summing_up;

struct dray_publisher {
    dray_context *context;
    dray__channel *channel;
    dray_layout *layout;
    dray_region **regions;
    uint64_t key, token, incarnation, set;
    uint32_t rank, world;
    bool checksum, local, pieces_made, incarnation_known;
    bool relaid; /* the coordinator is still to be told the layout */
    int64_t timeout_ns;
    dray__pieces pieces;
    dray__source_sums *gpu_sums; /* of the pieces that GPUs sum; NULL: none, or not yet compiled */
    CUevent fence;               /* of the publish that goes on; NULL: none */
    dray__mark *mark;            /* NULL: not needed yet */
    bool marked;                 /* readers wait for it: publish never does */
    dray__gate gate;             /* of dray_publisher_wait_stream */
    dray__delta *delta;          /* NULL: not asked for */
    dray__delta_view *delta_view;
    dray__staging *arena; /* NULL: not asked for */
    uint64_t published;   /* the newest version, any number, */
    bool has_published;   /* if there is one */
    bool withdrawn;       /* its readers were asked to go: no other one may begin */
    bool drained;         /* and they went */
    /* Of the caller's regions, to see that they are still those; with a snapshot `regions` are its
     * own, and the caller's are only read. */
    uint64_t *serials;
    dray_region **origin; /* NULL: no snapshot */
    bool released;
    /* What another coordinator is told when the session goes on with it. */
    char *model;
    dray__writer packed; /* the layout */
    dray__sums sums;     /* of what was published last; while they are taken none */
    dray__sums_forms sent;
    uint64_t returns; /* of the context, when this rank registered */
    dray__summing_up summing;
};

/* From now, for a timeout of the caller's. */
int64_t dray__publisher_deadline(const dray_publisher *p, int64_t timeout_ns);
/* Those of the layout, behind them the delta's, then the staging arena's. */
uint32_t dray__publisher_regions(const dray_publisher *p);
/* How many of them readers of this host can map, */
uint32_t dray__publisher_shared(const dray_publisher *p);
/* which the coordinator gets. */
int dray__publisher_put(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Where the connection broke: a new one, and where the session goes on with another coordinator,
 * the same registration there. The gang is met again: it may have got another incarnation. */
int dray__publisher_ensure(dray_publisher *p, int64_t deadline, dray_error *error);
/* Can a request that ended so be made again with the next coordinator? */
bool dray__publisher_again(const dray_publisher *p, int rc, int64_t deadline);
/* publisher_fence.c. Will readers be held back by the mark? endpoint: of the data server; NULL:
 * nobody reads through it. Before regions are put. */
int dray__publisher_marked(dray_publisher *p, const char *endpoint, dray_error *error);
/* What goes along with regions; NULL: nothing. */
const uint8_t *dray__publisher_event_of(dray_publisher *p);
/* Before the version is announced. */
int dray__publisher_fence(dray_publisher *p, const dray_fence *fence, int64_t deadline_ns,
                          dray_error *error);
/* publisher_sums.c. GPUs begin, as soon as the fence of the publish has come; the rest is still to
 * be done. */
int dray__publisher_sums_start(dray_publisher *p, uint64_t version, int64_t deadline_ns,
                               dray_error *error);
/* The version is announced: the sums are taken, and told, by a thread, which has the publisher
 * until it is waited for. */
void dray__publisher_sums_go(dray_publisher *p);
/* Waits for that. At the deadline: DRAY_ETIMEDOUT, and it goes on, */
int dray__publisher_sums_wait(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* or it is given up: DRAY_ECANCELED. Else what it came to, once. */
int dray__publisher_sums_end(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Tells that nobody can commit the version whose sums were given up. */
void dray__publisher_sums_forgo(dray_publisher *p, int64_t deadline_ns);
void dray__publisher_sums_init(dray_publisher *p);
void dray__publisher_sums_free(dray_publisher *p);
/* Joins the stream that waits. DRAY_EINVALID: an argument, or this rank did not publish that
 * version.
 */
int dray__publisher_check(dray_publisher *p, uint64_t version, int64_t timeout_ns,
                          dray_error *error);
/* Waits until nobody reads the version, or an older one, any more. */
int dray__publisher_drain(dray_publisher *p, uint64_t version, int64_t timeout_ns,
                          uint32_t *dropped, dray_error *error);
/* Remembers which regions the caller gave. */
int dray__publisher_note(dray_publisher *p, dray_region *const *regions, dray_error *error);
/* Offers this rank's memory to readers of this process and to its data server. */
int dray__publisher_offer(dray_publisher *p, dray_error *error);
