/* src/weights/: the two ends of an update of weights, publishers and subscribers, and what is
 * between them. The files of this folder itself are what both ends share: which elements of a
 * member's blocks count (pieces.c), slices of rectangles (slices.c), regions that callers hand in,
 * lists of handles, and tables of checksums. Each folder within it is one subject;
 * docs/architecture.md lists them in the order in which they may include each other. */

/* What the files of src/weights share. */
#pragma once

#include "base/arena.h"
#include "base/hook.h"
#include "base/options.h"
#include "control/channel.h"
#include "plan/rects.h"
#include "weights/sums.h"

#include <dray/weights.h>
#include <stdbool.h>

struct dray__delta_view; /* weights/delta/delta.h */
struct dray__staging;    /* weights/server/arena.h */

/* Copies and checksums go in pieces that stay in a core's own cache between the two. */
#define DRAY__SLICE_BYTES ((uint64_t)256 << 10)
#define DRAY__FILE_SLICE_BYTES ((uint64_t)1 << 20)

/* ---- local.c: what members of this process hold, for readers here and for its data server ---- */
typedef struct dray__local dray__local;
struct dray__shares; /* shares.h */
struct dray__event;
/* Layout, regions, delta and arena (NULL: there is none) are borrowed until dray__local_remove.
 * count: the layout's regions come first, others may follow. */
int dray__local_add(uint64_t token, const dray_layout *layout, dray_region *const *regions,
                    uint32_t count, const struct dray__delta_view *delta,
                    struct dray__staging *arena, dray_error *error);
/* What is published is there when the event is complete; borrowed as well. NULL: at once. */
void dray__local_set_mark(uint64_t token, struct dray__event *mark);
struct dray__event *dray__local_mark(const dray__local *local);
/* Waits until nobody holds it. */
void dray__local_remove(uint64_t token);
/* While it is held the publisher cannot close. NULL: not (or no longer) of this process. */
dray__local *dray__local_hold(uint64_t token);
/* The same for a reader's ticket. DRAY_EDEAD where dray__local_hold gives NULL. */
int dray__local_hold_ticket(uint64_t token, dray__local **out, dray_error *error);
void dray__local_release(dray__local *local);
dray_region *dray__local_region(const dray__local *local, uint32_t index);
const struct dray__delta_view *dray__local_delta(const dray__local *local);
struct dray__staging *dray__local_arena(const dray__local *local);
const dray_layout *dray__local_layout(const dray__local *local);
/* What an update that goes on has brought: from here on the member is read through it, by those of
 * its cohort alone. NULL: the update's memory is about to change, nobody may read it; waits until
 * nobody does. Takes the shares over. */
void dray__local_share(uint64_t token, struct dray__shares *shares);
/* This run is under way or over: who asks for what it brings need not wait for it to begin. */
void dray__local_began(uint64_t token, uint64_t run);
bool dray__local_has_begun(const dray__local *local, uint64_t run);
struct dray__shares *dray__local_shares(const dray__local *local); /* NULL: none */
/* Updates older than `attempt` must not read any more: the memory may change. */
void dray__local_revoke(uint64_t token, uint64_t attempt);
/* Its memory may be registered for one-sided reads (exports.h), which end when it is taken back.
 * While it is held. */
void dray__local_export(dray__local *local);
/* DRAY_ESTALE: revoked. */
int dray__local_check(const dray__local *local, uint64_t attempt, dray_error *error);
/* Who reads the member's memory also while no call of his is under way (a GPU copies). stop, called
 * from another thread once the memory is taken back from this attempt, ends that and returns when
 * nothing is read any more; it must not use this file. */
typedef struct dray__guest {
    struct dray__guest *next;
    dray__local *of; /* NULL: not, or no longer, in */
    uint64_t attempt;
    void (*stop)(void *user);
    void *user;
} dray__guest;
/* While it is held. */
void dray__local_enter(dray__local *local, dray__guest *guest);
void dray__local_depart(dray__guest *guest); /* one that was seen off is fine */
uint64_t dray__local_token(void);            /* a new one */

/* ---- pieces.c: which elements of a member's blocks count ------------------------------------- */
typedef struct dray__piece {
    dray__rect rect;
    uint32_t block;
    bool owned; /* no earlier member, and no earlier block of this one, holds it */
} dray__piece;

typedef struct dray__pieces {
    dray__piece *items; /* block by block; together they are exactly the blocks */
    uint32_t *first;    /* of each block; one more entry than blocks */
    uint32_t count;
    uint64_t capacity;
} dray__pieces;

typedef struct dray__holder {
    const dray_layout *layout;
    const char *const *names; /* a name for each tensor, equal names meaning the same; NULL: own */
} dray__holder;

/* The pieces of members[self], given all members in rank order. */
int dray__pieces_make(const dray__holder *members, uint32_t self, dray__pieces *out,
                      dray_error *error);
void dray__pieces_free(dray__pieces *pieces);
dray__rect dray__rect_of(const dray_layout *layout, uint32_t block);

/* ---- slices.c: a rectangle in slices of bounded size */
typedef struct dray__slicer {
    dray__rect whole;
    int64_t tile[DRAY_MAX_DIMS], at[DRAY_MAX_DIMS];
    bool done;
} dray__slicer;

/* Slices have at most `limit` bytes, but at least one element. */
void dray__slicer_start(dray__slicer *slicer, const dray__rect *whole, uint64_t element_bytes,
                        uint64_t limit);
/* Of a copy: slices that suit its mover. */
void dray__slicer_start_copy(dray__slicer *slicer, const dray_copy *copy, uint64_t limit);
bool dray__slicer_peek(const dray__slicer *slicer, dray__rect *out);
void dray__slicer_next(dray__slicer *slicer);
dray__rect dray__copy_rect(const dray_copy *copy);
/* Makes what the copy reads that part of a block of its tensor: the block holds all of it. */
void dray__copy_from_block(dray_copy *copy, const dray_layout *layout, uint32_t block);
/* Does the copy read, or fill, this part of the block? Two blocks may hold the same elements. */
bool dray__copy_reads(const dray_copy *copy, const dray_block *block, const dray__rect *part);
bool dray__copy_fills(const dray_copy *copy, const dray_block *block, const dray__rect *part);
/* The part of a copy that lies in rect, which lies in the copy. */
dray_copy dray__copy_cut(const dray_copy *copy, const dray__rect *rect);
/* The way on from where `in`, the copy's way to a dense place, leads. */
dray_copy dray__copy_onwards(const dray_copy *copy, const dray_copy *in);
/* Makes the destination dense, C order, at `offset` of region 0. Returns its bytes. */
uint64_t dray__copy_to_dense(dray_copy *copy, int32_t dtype, uint64_t offset);
/* The same within a larger rectangle that is dense. */
uint64_t dray__copy_to_box(dray_copy *copy, const dray__rect *box, int32_t dtype, uint64_t offset);
/* Makes the source dense in the same way. */
void dray__copy_from_box(dray_copy *copy, const dray__rect *box, int32_t dtype, uint64_t offset);

/* Walks the blocks of a tensor that hold some of a rectangle. */
typedef struct dray__blocks {
    const dray_block *block;
    uint32_t index;
    dray__rect cross; /* what it holds of it */
    bool all;         /* that is all of it */
    const dray_layout *layout;
    const dray_block *next;
    dray__rect rect;
} dray__blocks;
dray__blocks dray__blocks_of(const dray_layout *layout, uint32_t tensor, const dray__rect *rect);
bool dray__blocks_next(dray__blocks *blocks); /* false: there are no more */

uint64_t dray__tensor_elements(const dray_tensor_info *tensor);
/* Of the same dtype and shape. */
bool dray__tensor_like(const dray_tensor_info *a, const dray_tensor_info *b);

/* Cells are elements that share a scale; `cell` counts them in each dimension. */
dray__rect dray__transform_rect(const dray_transform *transform);
/* Those that a rectangle of elements touches. */
dray__rect dray__cells_touched(const int64_t *cell, const dray__rect *rect);
/* Those that lie in it, also the ones that end where `whole` does. false: there are none. */
bool dray__cells_inside(const int64_t *cell, const dray__rect *whole, const dray__rect *rect,
                        dray__rect *out);
/* Their elements, no further than `whole` goes. */
dray__rect dray__cells_elements(const int64_t *cell, const dray__rect *whole,
                                const dray__rect *cells);

/* ---- checksums.c */
struct dray_checksums {
    dray__sums sums;
};
/* Sum of a rectangle of a block. scratch: for files; made when first needed, the caller's. */
int dray__sum_rect(const dray_layout *layout, dray_region *const *regions, uint32_t block,
                   const dray__rect *rect, dray_region **scratch, uint64_t *sum, dray_error *error);
/* Adds the owned pieces' sums by tensor name. */
int dray__sum_pieces(const dray_layout *layout, dray_region *const *regions,
                     const dray__pieces *pieces, dray__sums *out, dray_error *error);

/* ---- checkpoint.c */
/* Plans between two layouts of this process, and carries the plan out. */
int dray__copy_all(const dray_layout *from, dray_region *const *sources, const char *name,
                   const dray_layout *to, dray_region *const *destinations, dray_error *error);

/* ---- manifest.c: sums that a checkpoint's files carry of their own tensors, in their metadata. */
#define DRAY__SUMS_KEY "dray.sums"
/* Adds those of all files of a layout; files without any add nothing. DRAY_EFORMAT: malformed, or
 * not of exactly the file's tensors. */
int dray__stored_sums(const dray_layout *files, dray__sums *out, dray_error *error);
/* Of 16 hexadecimal digits; false: it is not that (NULL is not). */
bool dray__sum_parse(const char *text, uint64_t *out);
/* DRAY_ECHECKSUM names the first file and tensor whose sum is not what the file says. */
int dray__stored_compare(const dray_layout *files, const dray__sums *stored,
                         const dray__sums *found, dray_error *error);
/* The same with zeros, for all tensors that have elements: sums that are known only when the bytes
 * are written. */
char **dray__values_later(const dray_layout *layout);
/* Puts the sums into the headers of the files, over such zeros. */
int dray__values_set(const dray_layout *files, const dray__sums *sums, dray_error *error);
void dray__values_free(char **values, const dray_layout *layout);

/* ---- regions.c */
/* Opens the files of a layout. NULL: *rc says why not. */
dray_region **dray__files_open(const dray_layout *files, int writable, int *rc, dray_error *error);
void dray__files_close(dray_region **opened, const dray_layout *files); /* NULL is fine */
/* Forces what was written to them to the disk. */
int dray__files_sync(dray_region *const *opened, const dray_layout *files, dray_error *error);
/* Of a kind that other processes of this host can map. */
bool dray__region_offered(const dray_region *region);
/* Offers a region to other processes, by its entry's key. DRAY_EUNSUPPORTED: not one to be offered,
 * or memory that its GPU's driver does not export. */
int dray__region_put(dray__channel *channel, const dray_context *context, uint64_t key,
                     uint32_t index, const dray_region *region, const uint8_t *event,
                     int64_t deadline_ns, dray_error *error);
/* How another process names it, packed. DRAY_EUNSUPPORTED: as above. */
enum { DRAY__HANDLE_PACKED = 1024 };
int dray__region_handle(const dray_region *region, uint64_t member, uint64_t epoch,
                        const uint8_t *event, uint8_t out[DRAY__HANDLE_PACKED], dray_error *error);
/* Block `index` of a layout, from one memory of it to another. */
dray_copy dray__block_copy(const dray_layout *layout, uint32_t index);
/* The same layout, in regions of another kind; regions: of their kinds instead (may be NULL). */
int dray__layout_in(const dray_layout *layout, dray_region_kind kind, dray_region *const *regions,
                    dray_layout **out, dray_error *error);
/* Are these the regions that the layout speaks of? */
int dray__regions_check(const dray_layout *layout, dray_region *const *regions, dray_error *error);

/* A copy of the caller's, with the GPUs that its regions lie on (regions may be NULL); packed form
 * appended to `packed` (may be NULL). */
int dray__layout_copy(const dray_layout *layout, dray_region *const *regions, dray_layout **out,
                      dray__writer *packed, dray_error *error);
/* The GPU of a member with this layout, for the planner; 0: none. */
uint64_t dray__layout_device(const dray_layout *layout);
dray_region **dray__regions_copy(const dray_layout *layout, dray_region *const *regions);

/* ---- sources.c: what an update reads, kept until it changes ---------------------------------- */
typedef struct dray__op {
    dray_copy copy;
    uint32_t block; /* of the destination */
    bool owned;     /* counts in the group's sums */
    bool scales;    /* reads the scales of a transform */
    bool wired;     /* of a transform: whole cells, which the source can quantise (wired.h) */
    /* 1 + which of the plan's: then the copy is one of its reads, and has no destination. 0: none
     */
    uint32_t transform;
} dray__op;

/* Kept with a source, or with all of them, from one update to the next, each by the file that made
 * it (base/arena.h). */
typedef struct dray__source {
    uint64_t member, host, token;
    int64_t pid;
    char *name, *endpoint; /* of its data server; "": none */
    dray_layout *layout;
    dray_region **regions;    /* imported ones; NULL where not, or where `local` has them */
    bool local, mapped;       /* mapped: its shared regions can be */
    bool staged;              /* what is not shared comes through its arena */
    uint64_t slot_bytes;      /* of that arena; 0: it has none */
    bool has_delta;           /* behind the layout's regions it has one that holds a delta */
    bool has_progress;        /* so has an engine's rank on a GPU, of its progress (upload.h) */
    struct dray__event *mark; /* says when what it published is there; NULL: it is */
    const dray_region *arena; /* the last of `regions`; NULL: not imported */
    dray__kept *kept;
} dray__source;

typedef struct dray__sources {
    uint64_t source_set;              /* 0: a checkpoint on disk */
    uint64_t group_set, host;         /* host: the destination's */
    struct dray__cuda_device *device; /* so is the GPU; NULL: none */
    dray__source *sources;
    uint32_t count;
    dray_plan *plan;
    dray__op *ops; /* in the plan's order */
    uint64_t op_count;
    uint64_t *transform_ops; /* where those of each transform begin, and the end */
    uint32_t *write_blocks;  /* the destination block of each of the plan's writes */
    const char **names;      /* for each destination tensor: the source's name of it */
    bool casts, files;
    dray__kept *kept;     /* of all of them together; ended before the regions are */
    dray__sums stored;    /* what a checkpoint says of its tensors; none: nothing */
    bool imported, ready; /* ready: nothing of it is missing, nor of the cohort */
    /* Who updates to the same version at the same time, this rank too; may change without the plan.
     */
    uint64_t cohort_set;
    dray__source *cohort;
    uint32_t cohort_wanted, cohort_count;
    /* while it is being made */
    uint32_t wanted;     /* sources; `count` are there */
    dray__source *group; /* the group's other ranks, until the plan is made */
    uint32_t group_count;
    uint16_t asked;                      /* the request whose answer is awaited; 0: none */
    uint64_t next_op;                    /* whose region is imported next */
    uint32_t next_extra;                 /* then: the source whose delta and arena are */
    uint32_t next_member;                /* then: whose regions of the cohort are */
    bool cohort_looked;                  /* what its members upload for each other is known */
    uint32_t asked_source, asked_region; /* of the REGION_GET */
    bool asked_member;                   /* the source is one of the cohort */
} dray__sources;

typedef struct dray__destination {
    dray_layout *layout;
    dray_region **regions;
    uint64_t member, host, token;
    uint32_t rank, world;
    dray_region *progress; /* where others see what it has uploaded (upload.h); NULL: it has none */
} dray__destination;

/* Publishers' memory as the source: set and ranks as the coordinator said. */
int dray__sources_live(uint64_t source_set, uint32_t source_count, uint64_t group_set,
                       const dray__destination *destination, dray__sources **out,
                       dray_error *error);
/* A checkpoint as the source. */
int dray__sources_disk(const char *path, uint64_t group_set, const dray__destination *destination,
                       dray__sources **out, dray_error *error);
/* Staging as the source: regions like the destination's, with room behind them, which it takes over
 * if it succeeds. Planned and imported. */
enum { DRAY__EXTRA_REGIONS = 2 };
int dray__sources_staged(const dray__destination *destination, dray_region **staging,
                         dray__sources **out, dray_error *error);
/* Fetches what is missing of the layouts of both sets, then plans. Does not wait: DRAY_EAGAIN until
 * the channel's started request is answered. Nothing to do once the plan is there. */
int dray__sources_plan(dray__sources *sources, dray__channel *channel, uint64_t key,
                       const dray__destination *destination, dray_error *error);
/* ops.c: plans, and makes the ops, once the layouts of both sets are there. */
int dray__sources_prepare(dray__sources *sources, const dray__destination *destination,
                          dray_error *error);
/* These ops by tensor, otherwise in their order; NULL: out of memory. */
uint64_t *dray__ops_by_tensor(const dray__sources *sources, const uint64_t *ops, uint64_t count);
/* Makes the regions that the plan reads reachable, in the same way. */
int dray__sources_import(dray__sources *sources, dray__channel *channel, uint64_t key,
                         dray_error *error);
/* Reads what the checkpoint's files say of their tensors now. */
int dray__sources_disk_sums(dray__sources *sources, dray_error *error);
/* Is the checkpoint still the one that was planned for? */
bool dray__sources_disk_same(const dray__sources *sources, const char *path);
/* local.c: holds those that are of this process (dray__local_hold), each at its number of `held`;
 * what is held is for the caller to release, also where this fails. DRAY_EDEAD: one closed. */
int dray__sources_hold(const dray__sources *sources, dray__local **held, dray_error *error);
void dray__sources_release(const dray__sources *sources, dray__local **held);
/* regions.c: is this region reached through its member's data server, rather than mapped? */
bool dray__source_remote(const dray__source *source, uint32_t region, uint64_t host);
/* Who updates together with this rank, to be fetched with the plan. set 0: nobody. */
int dray__sources_cohort(dray__sources *sources, uint64_t set, uint32_t count, dray_error *error);
/* Forgets the imported regions: the next import makes them anew. */
void dray__sources_close(dray__sources *sources);
void dray__sources_free(dray__sources *sources);

/* The first `count` members of a set, waiting for them; on failure those that have a layout are
 * there. */
int dray__members_fetch(dray__channel *channel, uint64_t key, uint64_t set, dray__source *sources,
                        uint32_t count, int64_t deadline_ns, dray_error *error);
void dray__source_clear(dray__source *source);

/* ---- transfer.c: carries out the copies, in lanes (transfer.h), and sums what it moved ---- */
typedef struct dray__transfer dray__transfer;

typedef struct dray__transfer_options {
    struct dray__load *load; /* NULL: into the destination's own memory. Borrowed until close. */
    int32_t strategy;
    uint64_t bucket_bytes, nccl_bytes; /* nccl_bytes 0: nothing comes over NCCL */
    bool verify;
    bool once;             /* the sources' ops are of this transfer alone */
    uint32_t ctas;         /* of kernels, at once; 0: as many as pay */
    int32_t copy_engines;  /* they move what they can; 0: what pays */
    int64_t within_ns;     /* what moves is spread over this time; 0: as fast as it can */
    uint64_t attempt;      /* what data servers are told */
    uint64_t run;          /* and those of its cohort's members; 0: there is no cohort */
    dray_region *progress; /* where they see what is here; NULL: nobody looks for it */
    const struct dray__stream_keys
        *keys; /* of the connections to them; borrowed, also after close */
    /* For each destination tensor: will the coordinator compare it as a whole with what publishers
     * announced? NULL: none. Borrowed until close. */
    const bool *compared;
    /* For each destination block: it is in place already, and nothing is to be moved. NULL: none
     * is. Borrowed until close. */
    const bool *in_place;
    /* What this rank holds as a whole, of the incarnation that it reads: what deltas build on. */
    bool has_base;
    uint64_t incarnation, base, version;
    /* This rank holds what the checkpoint that it reads is a delta on. */
    bool has_disk_base;
} dray__transfer_options;

#define DRAY__NO_COPY_ENGINES (-1)
#define DRAY__LEASE_DEFAULT (5 * DRAY__SECOND)
#define DRAY__BUCKET_MIN ((uint64_t)128 << 10)
#define DRAY__LOAD_MIN ((uint64_t)512 << 10)
#define DRAY__BUCKET_DEFAULT ((uint64_t)64 << 20)
#define DRAY__WITHIN_MAX 3600 /* seconds */
#define DRAY__NCCL_MIN ((uint64_t)1 << 20)
#define DRAY__NCCL_DEFAULT ((uint64_t)1 << 30)

/* Sources and destination are borrowed until close. */
int dray__transfer_open(dray__sources *sources, const dray__destination *destination,
                        const dray__transfer_options *options, dray__transfer **out,
                        dray_error *error);
/* Moves for about budget_ns. DRAY_EAGAIN: more is left. */
int dray__transfer_step(dray__transfer *transfer, int64_t budget_ns, dray_error *error);
/* After a step: nothing can be done until dray__transfer_fd is readable. */
bool dray__transfer_waits(const dray__transfer *transfer);
/* Adds to an error at the deadline what the update was waiting for. */
void dray__transfer_explain(const dray__transfer *transfer, dray_error *error);
/* Does it upload for others what they want, too (upload.h)? */
bool dray__transfer_uploads(const dray__transfer *transfer);
int dray__transfer_fd(const dray__transfer *transfer); /* level-triggered; -1: never waits */
/* Compares what was meant with what is there. DRAY_ECHECKSUM. */
int dray__transfer_check(const dray__transfer *transfer, dray_error *error);
/* Compares what is there with one sum a destination block; NULL: nothing to compare with. */
int dray__transfer_compare(const dray__transfer *transfer, const uint64_t *sums, dray_error *error);
/* Sums of the source bits that this rank owns within its group. */
int dray__transfer_sums(const dray__transfer *transfer, dray__sums *out, dray_error *error);
/* Sums of what lies in the destination, of the blocks that this rank owns, by its own names and
 * dtypes; none when those are the sums that it read (*as_read). DRAY_EUNSUPPORTED: that cannot be
 * said, because a block is owned in part or nothing was verified. */
int dray__transfer_resident(const dray__transfer *transfer, bool *as_read, dray__sums *out,
                            dray_error *error);
/* One sum a destination block; the caller's from here. NULL without verification. */
uint64_t *dray__transfer_take_blocks(dray__transfer *transfer);
#define DRAY__REPORT_FIRST dray__end_of(dray_update_report, planned)
void dray__transfer_report(const dray__transfer *transfer, dray_update_report *report);
void dray__transfer_close(dray__transfer *transfer);
