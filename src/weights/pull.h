/* What a reader asks a data server, and what it answers. A request names rectangles of the blocks
 * of one registered layout and the dtype that each is wanted in; its answer is their elements,
 * dense, one after the other, with two checksums of each: of the source's bits, and of what was
 * sent. So nobody needs to trust a network's own checksum, and nothing outside a registered block
 * can be asked for.
 *
 *  request  u32 magic, u16 version, u16 flags (1: with sums, 2: with a base, 4: of what an
 *           update in progress has brought; attempt: its run; 8: into the staging arena; 1024: with
 *           4: the sums alone, the reader has the regions mapped), u32 id,
 *           u32 body bytes; body: u64 token, u64 attempt, with a base u64 incarnation, u64 base,
 *           u64 version, u32 count, of each rectangle: u32 block, u8 dtype, u8 flags (1: read the
 *           source again and compare; 2: quantise it), for each dimension of its tensor i64
 *           start, i64 extent (global coordinates), and, of what is to be quantised, i64 elements
 *           of a cell in each dimension, u8 scale format
 *  answer   u32 magic, i32 status, u32 id, u32 head bytes, u64 data bytes; head: status 0: u64
 *           where the data lie in the arena (into the arena), of each rectangle u64 source sum,
 *           u64 sum of it as it is wanted (with sums; of what was quantised the elements' and the
 *           scales' together), u32 bytes that it takes of the data (with a base: fewer than its
 *           elements take are entries of a delta, delta.h), else a string; then the data, or, into
 *           the arena, none; what was quantised is followed by its scales
 *  taken    a request's header with no other flag than 16 and no body: what the answer of this id
 *           put into the arena is copied out. Has no answer.
 *  offer    a request's header with the flag 32 alone, and a body: to go on over UCX (offer.h),
 * which takes two of them.
 *
 *  keys     a request's header with the flag 64 alone, body: u64 token, u64 attempt: what is needed
 *           to read the member's regions one-sidedly (exports.h). Over UCX only.
 *  done     a request's header with the flag 128 alone, no body: those keys are not used any more.
 *           Has no answer.
 *  cells    a request's header with the flag 256 alone, and a body: ranges of bytes, not of weights
 *           (cells.h).
 *  regions  a request's header with the flag 512 alone, body: u64 token: how to reach a member's
 *           shared regions from another process of this host. Answer, as data: u64 process, u32
 *           count, of each region of its layout u32 descriptor, in that process (all ones: it is
 *           not shared), blob handle. Who may not look into that process cannot open them.
 *
 *  nccl     a request's header with the flag 2048 alone, body: u64 token, u64 attempt, u8 what.
 *           0, join: u32 version of the reader's NCCL, u64 bytes of a slot, 128 bytes id: the
 * server becomes rank 1 of a communicator whose rank 0 the reader is. 1, fetch: u32 count, of each
 * rectangle what a request says: their elements go to the reader over it, dense, one after the
 * other; answered, with both sums of each as above, once NCCL has them in hand. Not over encrypted
 * connections, for NCCL encrypts nothing.
 *
 * Answers come in the order of the requests. Of those into the arena (arena.h) a reader has one
 * unanswered, and one besides that it has not taken yet; the server reads on behind a request that
 * waits for a slot, for what has been taken meanwhile. */
#ifndef DRAY_WEIGHTS_PULL_H
#define DRAY_WEIGHTS_PULL_H

#include "base/wire.h"
#include "weights/internal.h"

#define DRAY__PULL_MAGIC 0x4c505244u /* "DRPL" */

enum {
    DRAY__PULL_VERSION = 3,
    DRAY__PULL_REQUEST_HEADER = 16,
    DRAY__PULL_ANSWER_HEADER = 24,
    DRAY__PULL_BODY_MAX = 64 << 10,
    DRAY__PULL_HEAD_MAX = 16 << 10,
    DRAY__PULL_DATA_MAX = 512 << 10,
    DRAY__PULL_RECTS_MAX = 256,
    DRAY__PULL_SUMS = 1, /* a request's flags */
    DRAY__PULL_BASE = 2,
    DRAY__PULL_COHORT = 4,
    DRAY__PULL_ARENA = 8,
    DRAY__PULL_TAKEN = 16,
    DRAY__PULL_UCX = 32,
    DRAY__PULL_KEYS = 64,
    DRAY__PULL_DONE = 128,
    DRAY__PULL_CELLS = 256,
    DRAY__PULL_REGIONS = 512,
    DRAY__PULL_MAPPED = 1024,
    DRAY__PULL_NCCL = 2048,
    DRAY__PULL_TWICE = 1, /* a rectangle's flags */
    DRAY__PULL_QUANTISED = 2
};

typedef struct dray__pull_header {
    uint16_t flags;
    uint32_t id, body_bytes;
} dray__pull_header;

/* How a rectangle is to be quantised. */
typedef struct dray__pull_quant {
    int32_t dtype, scale_format;
    int64_t cell[DRAY_MAX_DIMS]; /* elements that share a scale; 1 in unused dimensions */
} dray__pull_quant;

typedef struct dray__pull_rect {
    uint32_t block, ndim;
    int32_t dtype;
    bool twice, quantised;
    dray__pull_quant quant; /* with quantised */
    dray__rect rect;
} dray__pull_rect;

/* What the reader holds, and what it wants to hold: then a rectangle may be answered by what
 * changed since (delta.h). */
typedef struct dray__pull_base {
    uint64_t incarnation, base, version;
} dray__pull_base;

/* ---- the reader's side */
void dray__pull_put_request(dray__writer *w, uint32_t id, uint16_t flags, uint64_t token,
                            uint64_t attempt, const dray__pull_base *base,
                            const dray__pull_rect *rects, uint32_t count);
void dray__pull_put_taken(dray__writer *w, uint32_t id);
void dray__pull_put_keys(dray__writer *w, uint32_t id, uint64_t token, uint64_t attempt);
void dray__pull_put_keys_done(dray__writer *w);
void dray__pull_put_regions(dray__writer *w, uint32_t id, uint64_t token);
/* A request of NCCL's: its header, and the body so far; then dray__pull_put_rects, and
 * dray__pull_end_nccl with what begin returned. */
size_t dray__pull_begin_nccl(dray__writer *w, uint32_t id, uint64_t token, uint64_t attempt,
                             uint8_t what);
void dray__pull_put_rects(dray__writer *w, const dray__pull_rect *rects, uint32_t count);
void dray__pull_end_nccl(dray__writer *w, size_t begun);
/* What the head of an answer holds of each rectangle. */
uint32_t dray__pull_head_bytes(bool sums, bool base);

typedef struct dray__answer_header {
    int32_t status;
    uint32_t id, head_bytes;
    uint64_t data_bytes;
} dray__answer_header;
/* DRAY_EPROTO: not an answer, or larger than any can be. */
int dray__pull_get_answer(const uint8_t header[DRAY__PULL_ANSWER_HEADER], dray__answer_header *out,
                          dray_error *error);

/* ---- the server's side */
/* DRAY_EPROTO, DRAY_EVERSION. */
int dray__pull_get_request(const uint8_t header[DRAY__PULL_REQUEST_HEADER], dray__pull_header *out,
                           dray_error *error);
void dray__pull_put_answer(dray__writer *w, int status, uint32_t id, uint32_t head, uint64_t data);
void dray__pull_put_refusal(dray__writer *w, uint32_t id, const dray_error *error);
/* Reads what the body asks for into `staging`, and puts header and head of the answer. arena_at: of
 * a request into the arena, where in it that lies. What is wrong with the request becomes the
 * answer, with no data: *data_bytes is 0. false: out of memory. `packer` is the server's own. */
typedef struct dray__packer dray__packer;
dray__packer *dray__packer_new(void);
void dray__packer_free(dray__packer *packer);
bool dray__pull_answer(dray__packer *packer, const dray__pull_header *header, const uint8_t *body,
                       dray_region *staging, uint64_t arena_at, dray__writer *out,
                       uint64_t *data_bytes);
/* The data of an answer to a request for regions; at most `room` bytes. DRAY_EDEAD,
 * DRAY_EUNSUPPORTED. */
int dray__pull_regions(const uint8_t *body, uint32_t body_bytes, size_t room, dray__writer *out,
                       dray_error *error);
/* The rectangles of a request, checked against a layout, as copies to one dense buffer of `room`
 * bytes; `bytes`: how many they fill. copies: until the next call. */
int dray__pull_get_rects(dray__packer *packer, dray__reader *in, uint64_t room,
                         const dray_layout *layout, const dray_copy **copies, uint32_t *count,
                         uint64_t *bytes, dray_error *error);
bool dray__pull_quantises(const dray__packer *packer); /* is any of those to be quantised? */
/* The arena that a request's data go into, while *local is held; NULL: there is none any more. */
struct dray__arena *dray__pull_arena(const uint8_t *body, uint32_t body_bytes, dray__local **local);

#endif
