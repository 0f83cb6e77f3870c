/* src/weights/sources/: where the bytes of an update come from. sources.c finds the publishers'
 * layouts and makes their memory reachable. Then each kind of source is a file or a few: mapped
 * memory (memory.c), files (file.c), memory that GPUs reach (gpu.c), ranks that upload for each
 * other (upload.c), and data servers of other hosts (remote.c and remote_*.c). */

/* What the files of the source of data servers share: remote.c, which steps it,
 * remote_open.c, which deals what is to be read to those it is read from, remote_ask.c,
 * remote_read.c and remote_map.c, which ask for it, remote_take.c, which puts it in its place, and
 * remote_nccl.c, which does both of what NCCL brings. */
#pragma once

#include "base/clock.h"
#include "net/carrier.h"
#include "net/peer.h"
#include "weights/delta/delta.h"
#include "weights/server/arena.h"
#include "weights/server/shares.h"
#include "weights/transfer/cohort.h"
#include "weights/transfer/transfer.h"

enum {
    SEGMENT = 256 << 10, /* of data in one answer */
    SEGMENT_MIN = 8 << 10,
    RECTS = DRAY__BATCH, /* in one request */
    SLOTS = 4,
    WRONG_MAX = 3 /* answers that were changed on the way, one after the other */
};
#define WINDOW_MAX ((uint64_t)32 << 20)
#define STALL_NS (3 * DRAY__SECOND)
#define REFUSED_NS (3 * DRAY__SECOND)
#define PAUSE_MIN_NS (50 * DRAY__MILLISECOND)
#define PAUSE_MAX_NS DRAY__SECOND
#define TICK_NS (100 * DRAY__MILLISECOND)
#define BLIND_NS DRAY__MILLISECOND
#define NCCL_NS (DRAY__MILLISECOND / 40)
#define NOT_YET_NS (5 * DRAY__MILLISECOND)
#define PATIENCE_NS (5 * DRAY__SECOND) /* with a member of the cohort that brings nothing */
#define JOIN_NS (30 * DRAY__SECOND)    /* a communicator takes a second, or some */

/* A part of an op that lies in one block of its source. */
struct part {
    uint64_t op;
    uint32_t block;
    uint32_t publisher, publisher_block; /* has it, too, should a member of the cohort fail */
    dray__rect rect;
};

struct slice {
    uint64_t part;
    dray__rect rect;
};

struct request {
    struct request *next;
    uint32_t id, count;
    uint64_t bytes;
    int64_t asked_ns;
    bool plain;  /* deltas are not wanted */
    bool direct; /* is, or was, read one-sidedly, into a slot of its own, or out of a map */
    dray_region *slot;
    dray__net_reads reads;
    struct slice slices[];
};

struct queue {
    struct request *first, **last;
};

struct source {
    dray__source *of;
    dray__peer *link; /* kept with it from one update to the next; NULL: it has no data server */
    struct part *parts;
    uint64_t count, capacity, next;
    dray__slicer slicer;   /* of the part, */
    dray__delta_walk walk; /* or this one: along the slices of deltas */
    dray__rect ahead;      /* its next slice */
    bool in_part, has_ahead;
    struct queue again, flying;     /* to be asked for again; asked for, in order */
    uint64_t flying_bytes, segment; /* segment: of data in one answer */
    bool staged, copying; /* answers come through its arena; one is being copied out of it */
    dray_region *slot;    /* its answer is coming into it */
    uint32_t wrong;       /* answers in a row that were changed on the way */
    int64_t retry_ns, pause_ns, broken_ns;
    bool broken;
    /* What of it can be read one-sidedly: not known yet, asked for, nothing, what key_of says. */
    enum { KEYS_UNKNOWN, KEYS_ASKED, KEYS_NONE, KEYS_HERE } keys;
    uint32_t keys_id;
    uint8_t *key_data;
    struct remote_key *key_of;            /* its regions */
    dray__net_memory *slot_memory[SLOTS]; /* the lane's, registered for its connection */
    dray_region **maps; /* of a member of the cohort: KEYS_HERE says that its regions are mapped */
    uint32_t map_count;
    bool cohort;  /* a member of the cohort, not a publisher */
    bool probing; /* its answers said "not yet": ask for little */
    int64_t brought_ns, asleep_ns;
    bool watched;
    short events;
    dray_error trouble;
};

struct remote_lane {
    dray__transfer *transfer;
    struct source *sources;             /* publishers, then the members of the cohort */
    uint32_t count, publishers, active; /* active: those that have parts */
    dray__cohort *cohort;               /* NULL: everything comes from publishers */
    dray__shares *shares;               /* what others may take from here; the data server's */
    struct dray__remote_nccl *nccl;     /* brings what it can; NULL: nothing */
    uint64_t fanned_bytes;              /* that came from members on this host */
    uint32_t last_id;
    uint64_t segment, window, in_flight, peak, left; /* left: ops' bytes still to come */
    dray_region *slots[SLOTS], *all_slots[SLOTS];    /* slots: free ones */
    uint32_t free_slots, slot_count;
    dray__waker waker;
    uint64_t wire_before;

    /* the answer that is being put in its place */
    dray__batch batch;
    uint64_t at[RECTS];               /* where its data landed */
    bool sparse[RECTS], wired[RECTS]; /* it was entries of a delta; quantised */
    dray__delta_coder *coder;         /* NULL: no deltas can come */
    uint64_t coder_bytes;
    struct request *spare;
};

bool dray__remote_reaches(const dray__transfer *transfer, const dray__op *op,
                          const dray__placement *placement);
int dray__remote_open(dray__lane *lane, dray_error *error);
void dray__remote_close(void *state);
/* The block of the destination that a rectangle of an op fills, elements and scales or elements
 * alone. false: it fills several. */
bool dray__remote_block(const dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                        uint32_t *block);
/* Something more to read from a source. false: out of memory. */
bool dray__remote_push(struct source *source, const struct part *part);
void dray__remote_free(struct queue *queue);

/* ---- remote_ask.c */
const dray__op *dray__remote_op(const struct remote_lane *l, const struct source *s,
                                const struct slice *slice);
/* The dtype on the wire: the smaller one; of a member of the cohort, what lies there. */
int32_t dray__remote_dtype(const struct source *s, const dray_copy *copy);
/* How a slice of a copy is asked for, unless it is quantised. */
dray__pull_rect dray__remote_rect(const struct source *s, const struct slice *slice,
                                  const dray_copy *copy);
uint64_t dray__remote_bytes(const struct remote_lane *l, const struct source *s, const dray__op *op,
                            const dray__rect *rect);
/* Takes the next slice of the source's parts, if it has at most `room` bytes. */
bool dray__remote_next_slice(struct remote_lane *l, struct source *s, uint64_t room,
                             struct slice *out);
bool dray__remote_wants(const struct source *s); /* something is still to be asked for */
/* Fills the source's share of the window. */
int dray__remote_ask(struct remote_lane *l, struct source *s, dray_error *error);
/* Takes the oldest request off those in flight; what becomes of it. */
struct request *dray__remote_landed(struct remote_lane *l, struct source *s);
void dray__remote_end(struct remote_lane *l, struct request *request);

/* ---- remote_read.c: one-sided reads */
/* Asks for keys, or of a member of the cohort for its regions, where they are of use. false: that
 * is not settled yet, ask for nothing else. */
bool dray__remote_keys_settled(struct remote_lane *l, struct source *s);
/* The answer to that. */
int dray__remote_take_keys(struct remote_lane *l, struct source *s, dray_error *error);
/* dropped: the connection is gone already. Else no read is under way. */
void dray__remote_forget_keys(struct source *s, bool dropped);
/* Is this part read one-sidedly? */
bool dray__remote_reads(const struct remote_lane *l, const struct source *s,
                        const struct part *part, const dray__op *op);
/* Begins to read into the request's slot. */
void dray__remote_read(struct remote_lane *l, struct source *s, struct request *request);
/* DRAY_OK: all of it is there. DRAY_EAGAIN; else the connection broke. */
int dray__remote_read_done(struct source *s, struct request *request, dray_error *error);

/* ---- remote_map.c: members of the cohort on this host */
bool dray__remote_may_map(const struct remote_lane *l, const struct source *s);
int dray__remote_take_maps(struct source *s, const uint8_t *data, uint64_t size, dray_error *error);
void dray__remote_unmap(struct source *s);
/* From a mapped region to the op's place. */
dray_copy dray__remote_out_of_map(const struct source *s, const struct part *part,
                                  const dray_copy *op, const dray__rect *rect);

/* ---- remote_take.c: `head` is that of an answer, behind its header */
size_t dray__remote_head_start(const struct source *s); /* before what it says of rectangles */
/* Do the rectangles' data add up to what came, none with more than its elements take? */
bool dray__remote_fits(const struct remote_lane *l, const struct source *s,
                       const struct request *request, const dray__arrival *arrival);
/* Moves what landed to its place, but for what was quantised. */
int dray__remote_place(struct remote_lane *l, struct source *s, const struct request *request,
                       const uint8_t *head, dray_error *error);
/* What was quantised, once it is known to be right. */
int dray__remote_place_wired(struct remote_lane *l, struct source *s, const struct request *request,
                             dray_error *error);
/* Is what came what was sent, and what the source's sum speaks of? */
bool dray__remote_unchanged(const struct remote_lane *l, const struct source *s,
                            const struct request *request, const uint8_t *head);
/* Into the books, and to those who take it from here. */
void dray__remote_enter(struct remote_lane *l, struct source *s, const struct request *request,
                        const uint8_t *head);
/* Others of the cohort may take this part of an op from here: the sums of the publisher's bits, and
 * of those that lie here. */
void dray__remote_share(struct remote_lane *l, const dray__op *op, const dray__rect *rect,
                        uint64_t source_sum, uint64_t sum);

/* ---- remote_nccl.c: GPU memory of publishers on other hosts */
/* Sets l->nccl: takes from the publishers' parts those that NCCL can bring within nccl_bytes. */
int dray__remote_nccl_open(struct remote_lane *l, dray_error *error);
void dray__remote_nccl_close(struct dray__remote_nccl *nccl); /* NULL is fine, below as well */
/* Where a publisher turns out to be out of NCCL's reach, its parts go back to the lane. */
int dray__remote_nccl_step(struct dray__remote_nccl *nccl, bool *moved, dray_error *error);
bool dray__remote_nccl_busy(const struct dray__remote_nccl *nccl);
uint64_t dray__remote_nccl_wire(const struct dray__remote_nccl *nccl); /* bytes, with requests */
uint64_t dray__remote_nccl_held(const struct dray__remote_nccl *nccl); /* bytes of slots */
/* As explain of dray__source_type. false: it has brought everything. */
bool dray__remote_nccl_explain(const struct dray__remote_nccl *nccl, dray_error *error);
