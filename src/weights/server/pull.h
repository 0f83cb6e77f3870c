/* Requests of readers to a data server, and its answers. A request names rectangles of the blocks
 * of one registered layout, and the dtype that each is wanted in. The answer has their elements,
 * dense, one rectangle after the other, with two checksums of each: of the source's bits, and of
 * the bits that were sent. So the checksums do not depend on the network's, and nothing outside a
 * registered block can be read.
 *
 *  RECTS    request: u64 token, u64 attempt, u16 options,
 *           with a base: u64 incarnation, u64 base, u64 version,
 *           u32 count, and for each rectangle:
 *             u32 block, u8 dtype,
 *             u8 flags (1: read the source again and compare; 2: quantise it),
 *             for each dimension of its tensor i64 start, i64 extent (global coordinates),
 *             if it is to be quantised: for each dimension i64 elements of a cell; u8 scale format
 *           options: 1: with sums; 2: with a base; 4: read parts that an update in progress has
 *           received (attempt is its run); 8: put the data into the staging arena; 16 (with 1 and
 *           4): the sums alone, because the reader has the regions mapped
 *           answer: into the arena: u64 offset of the data in the arena;
 *           for each rectangle:
 *             with sums: u64 source sum, u64 sum of the bits as they are wanted (of a quantised
 *             rectangle: of elements and scales together),
 *             with a base: u32 bytes of its data (fewer than its elements take: entries of a
 *             delta, delta.h; of a quantised rectangle pull_quant.h);
 *           then the data, unless they are in the arena; the elements of a quantised rectangle are
 *           followed by its scales (pull_quant.h)
 *  TAKEN    the reader has copied the data of this id's answer out of the arena
 *  REGIONS  request: u64 token, u64 0: asks how a process of this host can map a member's shared
 *           regions. Answer, as data: u64 process, u32 count, and for each region of the layout u32
 *           descriptor in that process (all ones: the region is not shared), blob handle. A reader
 *           that is not allowed to trace that process (ptrace) cannot open them.
 *  NCCL     request: u64 token, u64 attempt, u8 kind.
 *           0, join: u32 version of the reader's NCCL, u64 bytes of a slot, u32 thread blocks of
 *           NCCL's kernels, 128 bytes id. The server becomes rank 1 of a communicator in which the
 *           reader is rank 0.
 *           1, fetch: u8 slot, u32 count, and for each rectangle the same as in RECTS. The elements
 *           are packed into that slot, dense, one rectangle after the other, and sent to the reader
 *           over the communicator. All rectangles of a request are to be quantised, by the GPU
 *           then, or none is. The answer, with both sums of each rectangle as above, is sent
 *           once they are packed. One request for each slot may be without an answer. NCCL encrypts
 *           nothing, so that it is refused on encrypted connections.
 * A reader has at most one request for an answer in the arena (arena.h) without an answer, and one
 * more answer that it has not taken yet. While a request waits for a slot, the server reads further
 * messages, because a TAKEN among them frees one. */
#pragma once

#include "net/server.h"
#include "weights/internal.h"

enum {
    DRAY__PULL_RECTS_MAX = 256,
    DRAY__PULL_QUANT_MAX = 512 << 10, /* bytes of a rectangle that a CPU quantises */
    DRAY__PULL_SUMS = 1,              /* a request's options */
    DRAY__PULL_BASE = 2,
    DRAY__PULL_COHORT = 4,
    DRAY__PULL_ARENA = 8,
    DRAY__PULL_MAPPED = 16,
    DRAY__PULL_OPTIONS = 31, /* all of them */
    DRAY__PULL_TWICE = 1,    /* a rectangle's flags */
    DRAY__PULL_QUANTISED = 2
};

/* How a reader wants a rectangle to be quantised. */
typedef struct dray__pull_quant {
    int32_t dtype, scale_format;
    /* The number of elements that share a scale in each dimension; 1 in unused dimensions. */
    int64_t cell[DRAY_MAX_DIMS];
} dray__pull_quant;

typedef struct dray__pull_rect {
    uint32_t block, ndim;
    int32_t dtype;
    bool twice, quantised;
    dray__pull_quant quant; /* with quantised */
    dray__rect rect;
} dray__pull_rect;

/* The version that the reader holds, and the version that it wants. With both, a rectangle may
 * be answered by the changes since then (delta.h). */
typedef struct dray__pull_base {
    uint64_t incarnation, base, version;
} dray__pull_base;

typedef struct dray__pull_ticket { /* Every request but CELLS begins with a ticket. */
    uint64_t token, attempt;
} dray__pull_ticket;

extern const dray__fields dray__pull_ticket_fields, dray__pull_base_fields;

/* ---- the reader's side */
void dray__pull_put_request(dray__writer *w, uint32_t id, uint16_t options, uint64_t token,
                            uint64_t attempt, const dray__pull_base *base,
                            const dray__pull_rect *rects, uint32_t count);
/* Begins a request of a type that starts with token and attempt, as all but CELLS do. Pass the
 * returned value to dray__request_end. */
size_t dray__pull_begin(dray__writer *w, uint16_t type, uint32_t id, uint64_t token,
                        uint64_t attempt);
void dray__pull_put_rects(dray__writer *w, const dray__pull_rect *rects, uint32_t count);
/* Returns the bytes of an answer's head that describe one rectangle. */
uint32_t dray__pull_head_bytes(bool sums, bool base);

/* ---- the server's side */

/* Returns the token of the reader's request; 0 when it has none. */
uint64_t dray__pull_token(const dray__data_reader *reader);
uint16_t dray__pull_options(const dray__data_request *request, const uint8_t *body);
/* Reads the requested rectangles into `staging`, and puts the header and the head of the answer.
 * arena_at is the place in the arena of the data of a request into the arena. An error in the
 * request becomes the answer, without data: *data_bytes is then 0. Returns false when out of
 * memory. `packer` is the server's own. */
typedef struct dray__packer dray__packer;
dray__packer *dray__packer_new(void);
void dray__packer_free(dray__packer *packer);
bool dray__pull_answer(dray__packer *packer, const dray__data_request *request, const uint8_t *body,
                       dray_region *staging, uint64_t arena_at, dray__writer *out,
                       uint64_t *data_bytes);
/* Puts the data of the answer to a request for regions, at most `room` bytes. Fails with
 * DRAY_EDEAD or DRAY_EUNSUPPORTED. */
int dray__pull_regions(uint64_t token, size_t room, dray__writer *out, dray_error *error);
/* Checks the rectangles of a request against a layout, and returns them as copies to one dense
 * buffer of `room` bytes, of which a quantised one takes at most `room_of_quant`. `bytes` is the
 * number of bytes that they fill. The copies are valid until the next call. */
int dray__pull_get_rects(dray__packer *packer, dray__reader *in, uint64_t room,
                         uint64_t room_of_quant, const dray_layout *layout,
                         const dray_copy **copies, uint32_t *count, uint64_t *bytes,
                         dray_error *error);
/* Returns how many of these rectangles are to be quantised. quants[i]: how rectangle i is, if it is
 * one of them. */
uint32_t dray__pull_quants(const dray__packer *packer, const dray__pull_quant **quants);
