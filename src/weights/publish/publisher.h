/* src/weights/publish/: the trainer's end of an update. A publisher registers its blocks,
 * announces each version before the bytes are there (publisher_fence.c), sums it while readers
 * begin (publisher_sums.c), and waits for both before the trainer writes again, on the host or on a
 * stream of a GPU (gate.c). snapshot.c fills the copy that readers read where the trainer goes on
 * at once. publisher_deliver.c waits until groups have committed a version; publisher_move.c is for
 * memory that moves or is taken back. */

/* The structure of a publisher, and the functions that its files share. */
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
    dray__sums_form *form; /* the form of the last version's sums, probably of these, too */
    dray_error outcome;
} dray__summing_up;

typedef struct dray__snapshot_gpu dray__snapshot_gpu;

struct dray_publisher {
    dray_context *context;
    dray__channel *channel;
    dray_layout *layout;
    dray_region **regions;
    uint64_t key, token, incarnation, set;
    uint32_t rank, world;
    bool checksum, local, pieces_made, incarnation_known;
    bool relaid; /* the layout has changed, and the coordinator does not have it yet */
    int64_t timeout_ns;
    dray__pieces pieces;
    dray__source_sums *gpu_sums; /* of the pieces that GPUs sum; NULL when there are none, or until
                                  * compiled */
    CUevent fence;               /* the fence of the current publish; NULL when there is none */
    dray__mark *mark;            /* NULL until it is needed */
    bool marked;                 /* readers wait for the mark, so that publish need not wait */
    dray__gate gate;             /* of dray_publisher_wait_stream */
    dray__delta *delta;          /* NULL when the publisher makes no deltas */
    dray__delta_view *delta_view;
    dray__staging *arena; /* NULL when there is none */
    uint64_t published;   /* the newest version, valid with has_published */
    bool has_published;
    bool withdrawn; /* no other reader of that version may begin */
    bool drained;   /* and all of its readers have ended */
    /* The numbers of the caller's regions, to notice when one was freed. */
    uint64_t *serials;
    dray_region **origin; /* the caller's regions if `regions` are a snapshot; else NULL */
    dray__snapshot_gpu *snapshot_gpus; /* the jobs that copy it (snapshot.c); NULL until compiled */
    bool released;
    /* The fields that this rank registers at the next coordinator when the session continues
     * there. */
    char *model;
    dray__writer packed; /* the layout */
    dray__sums sums;     /* of the last version; empty while they are computed */
    dray__sums_forms sent;
    uint64_t returns; /* the context's number of returns when this rank registered */
    dray__summing_up summing;
};

/* Returns the deadline of a call with this timeout. */
int64_t dray__publisher_deadline(const dray_publisher *p, int64_t timeout_ns);
/* Returns the number of its regions: the layout's, then the delta's, then the staging arena's. */
uint32_t dray__publisher_regions(const dray_publisher *p);
/* Returns one of them; NULL for a region that its caller has freed, or that is released. */
dray_region *dray__publisher_region(const dray_publisher *p, uint32_t region);
/* Returns the number of regions that readers of this host can map. */
uint32_t dray__publisher_shared(const dray_publisher *p);
/* Sends the handles of these regions to the coordinator. */
int dray__publisher_put(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Connects again if the connection broke. When the session continues at another coordinator,
 * registers there with the same ids, and learns its incarnation, which may be a new one. */
int dray__publisher_ensure(dray_publisher *p, int64_t deadline, dray_error *error);
/* Returns true when a request that ended with rc can be repeated with the next coordinator. */
bool dray__publisher_again(const dray_publisher *p, int rc, int64_t deadline);
/* publisher_fence.c. Decides whether readers wait for the mark. endpoint is the data server's, or
 * NULL when there is none. Call it before regions are put. */
int dray__publisher_marked(dray_publisher *p, const char *endpoint, dray_error *error);
/* Returns the handle of the event that is sent with regions; NULL when there is none. */
const uint8_t *dray__publisher_event_of(dray_publisher *p);
/* Waits for the caller's fence, or records the mark behind it. Called before the version is
 * announced. */
int dray__publisher_fence(dray_publisher *p, const dray_fence *fence, int64_t deadline_ns,
                          dray_error *error);
/* publisher_sums.c. Starts the sums of GPU memory, which are computed after the publish's fence. */
int dray__publisher_sums_start(dray_publisher *p, uint64_t version, int64_t deadline_ns,
                               dray_error *error);
/* Called after the announcement. Starts a thread that computes the sums and sends them to the
 * coordinator. Until it is waited for, only that thread may use the publisher. */
void dray__publisher_sums_go(dray_publisher *p);
/* Waits for that thread. Fails with DRAY_ETIMEDOUT at the deadline, and the thread continues. */
int dray__publisher_sums_wait(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Waits for that thread, and stops it at the deadline (DRAY_ECANCELED). Otherwise returns the
 * thread's result, once. */
int dray__publisher_sums_end(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Tells the coordinator that no group can commit the version, because its sums were given up. */
void dray__publisher_sums_forgo(dray_publisher *p, int64_t deadline_ns);
void dray__publisher_sums_init(dray_publisher *p);
void dray__publisher_sums_free(dray_publisher *p);
/* Checks the arguments of a call about a version, and that this rank has published it. Waits for
 * the thread of dray_publisher_wait_stream, if there is one. */
int dray__publisher_check(dray_publisher *p, uint64_t version, int64_t timeout_ns,
                          dray_error *error);
/* Waits until no group reads the version, or an older one. */
int dray__publisher_drain(dray_publisher *p, uint64_t version, int64_t timeout_ns,
                          uint32_t *dropped, dray_error *error);
/* Notes the numbers of the caller's regions. */
int dray__publisher_note(dray_publisher *p, dray_region *const *regions, dray_error *error);
/* Offers this rank's memory to readers of this process and to its data server. */
int dray__publisher_offer(dray_publisher *p, dray_error *error);
