/* src/weights/sources/: where the bytes of an update come from. sources.c finds the publishers'
 * layouts and makes their memory reachable. Then each kind of source is a file or a few: mapped
 * memory (memory.c), files (file.c), memory that GPUs reach (gpu.c), ranks that upload for each
 * other (upload.c), and data servers of other hosts (remote.c and remote_*.c). */

/* The structures and functions that the files of the source "data servers" share. remote.c steps
 * the route. remote_open.c divides the ops into parts, and the parts among the publishers and the
 * members of the cohort. remote_ask.c sends requests, remote_read.c reads one-sidedly, remote_map.c
 * maps regions of members on this host. remote_take.c puts answers in their place. remote_nccl.c
 * does all of this for the parts that NCCL brings. */
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
    SEGMENT = 256 << 10,            /* the bytes of data in one answer, */
    SEGMENT_DELTA = DRAY__DATA_MAX, /* that would be in it if no slice came as a delta */
    SEGMENT_MIN = 8 << 10,
    RECTS = DRAY__BATCH, /* the rectangles of one request */
    SLOTS = 4,
    PATCHED = 1 << 20, /* bytes of the quantised rectangles of an answer, if it may have changes */
    WRONG_MAX = 3      /* how many answers in a row may have wrong checksums */
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
#define NOT_YET_MAX_NS (200 * DRAY__MILLISECOND)
#define PATIENCE_NS (5 * DRAY__SECOND) /* for a member of the cohort that sends nothing */
#define JOIN_NS (30 * DRAY__SECOND)    /* for a communicator, which takes a second or more */

/* A part of an op that is in one block of its source. */
struct part {
    uint64_t op;
    uint32_t block;
    uint32_t publisher, publisher_block; /* have the same, in case a member of the cohort fails */
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
    bool plain;  /* the answer must have whole elements, not deltas */
    bool direct; /* it is read one-sidedly into a slot of its own, or from a mapped region */
    dray_region *slot;
    dray__net_reads reads;
    struct slice slices[];
};

struct queue {
    struct request *first, **last;
};

struct source {
    dray__source *of;
    dray__peer *link; /* the connection, kept between updates; NULL when it has no data server */
    struct part *parts;
    uint64_t count, capacity, next;
    dray__slicer slicer;   /* cuts the current part into slices; */
    dray__delta_walk walk; /* or this does, along the slices of deltas */
    dray__rect ahead;      /* the next slice */
    bool in_part, has_ahead;
    struct queue again;             /* requests that are to be sent again */
    struct queue flying;            /* requests without an answer, in the order of sending */
    uint64_t flying_bytes, segment; /* segment: the bytes of data in one answer */
    bool staged, copying; /* answers come through its arena; one is being copied out of it */
    dray_region *slot;    /* the slot that receives the current answer */
    uint32_t wrong;       /* the number of answers in a row with wrong checksums */
    int64_t retry_ns, pause_ns, broken_ns;
    bool broken;
    /* Which regions can be read one-sidedly: not known yet, asked for, none, those in key_of. */
    enum { KEYS_UNKNOWN, KEYS_ASKED, KEYS_NONE, KEYS_HERE } keys;
    uint32_t keys_id;
    uint8_t *key_data;
    struct remote_key *key_of;            /* the keys of its regions */
    dray__net_memory *slot_memory[SLOTS]; /* the route's slots, registered for its connection */
    dray_region **maps; /* a cohort member's regions, mapped; set with KEYS_HERE */
    uint32_t map_count;
    bool over_nccl; /* its slices are brought by NCCL, whole */
    bool cohort;    /* it is a member of the cohort, not a publisher */
    bool probing;   /* its last answer was "not yet", so that requests stay small */
    int64_t brought_ns, asleep_ns;
    bool watched;
    short events;
    dray_error trouble;
};

struct remote_route {
    dray__transfer *transfer;
    struct source *sources;             /* publishers, then the members of the cohort */
    uint32_t count, publishers, active; /* active: the number of sources with parts */
    dray__cohort *cohort;               /* NULL when everything comes from publishers */
    dray__shares *shares;               /* rectangles that other members may read here */
    struct dray__remote_nccl *nccl;     /* the parts that NCCL brings; NULL when there are none */
    uint64_t fanned_bytes;              /* bytes that came from members on this host */
    uint32_t last_id;
    uint64_t segment, window, in_flight, peak, left; /* left: bytes of ops that are still to come */
    dray_region *slots[SLOTS], *all_slots[SLOTS];    /* slots: the free ones */
    uint32_t free_slots, slot_count;
    dray__waker waker;
    uint64_t wire_before;

    /* the answer that is being put in its place */
    dray__batch batch;
    uint64_t at[RECTS];       /* the offset of each rectangle's data in the slot */
    bool sparse[RECTS];       /* the rectangle came as entries of a delta */
    bool prequantised[RECTS]; /* the rectangle came quantised */
    dray__delta_coder *coder; /* NULL when no deltas can come */
    uint64_t coder_bytes;
    /* PATCHED bytes: this rank's quantised rectangles with the changes of the answer, before they
     * are checked and written back. NULL when none can come. */
    dray_region *patched;
    struct request *spare;
};

bool dray__remote_reaches(const dray__transfer *transfer, const dray__op *op,
                          const dray__placement *placement);
int dray__remote_open(dray__route *route, dray_error *error);
void dray__remote_close(void *state);
/* Returns the block of the destination that a rectangle of an op fills. Returns false when it fills
 * several blocks (other than a block of elements and its scales). */
bool dray__remote_block(const dray__transfer *transfer, const dray__op *op, const dray__rect *rect,
                        uint32_t *block);
/* Adds a part to a source's list. Returns false when memory runs out. */
bool dray__remote_push(struct source *source, const struct part *part);
void dray__remote_free(struct queue *queue);

/* ---- remote_ask.c */
const dray__op *dray__remote_op(const struct remote_route *l, const struct source *s,
                                const struct slice *slice);
/* Returns the dtype on the network: the smaller one of both ends; for a member of the cohort, the
 * dtype of its memory. */
int32_t dray__remote_dtype(const struct source *s, const dray_copy *copy);
/* Returns the rectangle of a request for a slice, read once. */
dray__pull_rect dray__remote_rect(const struct remote_route *l, const struct source *s,
                                  const struct slice *slice);
uint64_t dray__remote_bytes(const struct remote_route *l, const struct source *s,
                            const dray__op *op, const dray__rect *rect);
/* Takes the next slice of the source's parts, if it has at most `room` bytes. */
bool dray__remote_next_slice(struct remote_route *l, struct source *s, uint64_t room,
                             struct slice *out);
bool dray__remote_wants(const struct source *s); /* there are parts that were not asked for yet */
/* Sends requests until the source's share of the window is full. */
int dray__remote_ask(struct remote_route *l, struct source *s, dray_error *error);
/* Removes the oldest request from those in flight, and returns it. */
struct request *dray__remote_landed(struct remote_route *l, struct source *s);
void dray__remote_end(struct remote_route *l, struct request *request);

/* ---- remote_read.c: one-sided reads */
/* Asks a publisher for its keys, or a member of the cohort for its regions, if they are of use.
 * Returns false until the answer is there; until then nothing else is asked for. */
bool dray__remote_keys_settled(struct remote_route *l, struct source *s);
/* Takes the answer with the keys or the regions. */
int dray__remote_take_keys(struct remote_route *l, struct source *s, dray_error *error);
/* Forgets the keys. dropped: the connection is gone already; otherwise no read may be under way. */
void dray__remote_forget_keys(struct source *s, bool dropped);
/* Returns true when this part is read one-sidedly. */
bool dray__remote_reads(const struct remote_route *l, const struct source *s,
                        const struct part *part, const dray__op *op);
/* Begins to read into the request's slot. */
void dray__remote_read(struct remote_route *l, struct source *s, struct request *request);
/* Returns DRAY_OK when everything was read, DRAY_EAGAIN when not yet, and otherwise the error that
 * broke the connection. */
int dray__remote_read_done(struct source *s, struct request *request, dray_error *error);

/* ---- remote_map.c: members of the cohort on this host */
bool dray__remote_may_map(const struct remote_route *l, const struct source *s);
int dray__remote_take_maps(struct source *s, const uint8_t *data, uint64_t size, dray_error *error);
void dray__remote_unmap(struct source *s);
/* Returns the copy from a mapped region to the op's place. */
dray_copy dray__remote_out_of_map(const struct source *s, const struct part *part,
                                  const dray_copy *op, const dray__rect *rect);

/* ---- remote_take.c: `head` is the head of an answer, which follows its header */
size_t dray__remote_head_start(const struct source *s); /* the bytes before the rectangles' part */
/* Checks that the sizes of the rectangles' data add up to the answer's, and that none is larger
 * than its elements. */
bool dray__remote_fits(const struct remote_route *l, const struct source *s,
                       const struct request *request, const dray__arrival *arrival);
/* Moves the rectangles of the answer to their place, except the quantised ones. */
int dray__remote_place(struct remote_route *l, struct source *s, const struct request *request,
                       const uint8_t *head, dray_error *error);
/* Moves the quantised rectangles to their place, after their checksums were compared. */
int dray__remote_place_prequantised(struct remote_route *l, struct source *s,
                                    const struct request *request, dray_error *error);
/* Checks that the data are those that were sent, and those of the source's checksums. */
bool dray__remote_unchanged(const struct remote_route *l, const struct source *s,
                            const struct request *request, const uint8_t *head);
/* Enters the answer's sums in the books, and shares its rectangles with the cohort. */
void dray__remote_enter(struct remote_route *l, struct source *s, const struct request *request,
                        const uint8_t *head);
/* Lets other members of the cohort read this part of an op here. source_sum: of the publisher's
 * bits; sum: of the bits in this rank's memory. */
void dray__remote_share(struct remote_route *l, const dray__op *op, const dray__rect *rect,
                        uint64_t source_sum, uint64_t sum);

/* ---- remote_nccl.c: GPU memory of publishers on other hosts */
/* Sets l->nccl, and moves the parts that NCCL can bring within nccl_bytes from the publishers to
 * it. */
int dray__remote_nccl_open(struct remote_route *l, dray_error *error);
void dray__remote_nccl_close(struct dray__remote_nccl *nccl); /* NULL is fine, below as well */
/* Works on the parts of NCCL. The parts of a publisher that NCCL cannot reach go back to the
 * route. */
int dray__remote_nccl_step(struct dray__remote_nccl *nccl, bool *moved, dray_error *error);
bool dray__remote_nccl_busy(const struct dray__remote_nccl *nccl);
uint64_t dray__remote_nccl_wire(const struct dray__remote_nccl *nccl); /* bytes, with requests */
uint64_t dray__remote_nccl_held(const struct dray__remote_nccl *nccl); /* bytes of slots */
/* Does the same as `explain` of dray__source_type. Returns false when all parts have arrived. */
bool dray__remote_nccl_explain(const struct dray__remote_nccl *nccl, dray_error *error);
