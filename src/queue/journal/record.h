/* The files of journals: a head, then records. This file reads them, and writes them through an
 * output.
 *
 * The head: u32 magic "DRJF", u32 format, u64 salt, u64 0, u64 XXH3 of these. The salt is random,
 * and a new one whenever the file is rewritten; it seeds the sums of records. So any bytes may
 * follow the last record: records of the file's earlier use have another salt, and a producer does
 * not know the salt, so that it cannot forge a record in a sample.
 *
 * A record: u32 magic "DRJR", u16 kind, u16 format, u64 bytes of the body, u64 sequence number,
 * u64 number of the last record that was safe when it was written, u32 owner, u32 flags (1: its
 * pieces were lost, and are zeros), u64 XXH3 of the body and then this header (with the sum 0); the
 * body; zeros up to a multiple of 8. The header is written last, so that the first bytes of a
 * record are written to the disk while the next ones are fetched and summed. */
#pragma once

#include "queue/journal/journal.h"

enum {
    DRAY__FILE_HEAD = 32,
    DRAY__RECORD_HEAD = 48,
    DRAY__RECORD_MISSING = 1 /* a flag */
};

typedef struct dray__record { /* its header */
    uint32_t magic;
    uint16_t kind, format;
    uint64_t size, seq, safe;
    uint32_t owner, flags;
    uint64_t sum;
} dray__record;

typedef struct dray__file_head {
    uint32_t magic, format;
    uint64_t salt, zero, sum;
} dray__file_head;

extern const dray__fields dray__record_fields, dray__file_head_fields;

/* Returns the record's bytes in the file, with its header. */
uint64_t dray__record_bytes(const dray__record *record);
/* Reads the header at `at`. Returns 0, or DRAY_EFORMAT when there is no header that fits before
 * `end`. */
int dray__record_at(int fd, const char *path, uint64_t at, uint64_t end, dray__record *out,
                    dray_error *error);
/* Calls `each` for the complete records of a file of `file` bytes. *end is the end of the last one.
 */
int dray__records_read(int fd, const char *path, uint64_t salt, uint64_t file,
                       dray__journal_each each, void *user, uint64_t *end, uint64_t *last,
                       dray_error *error);
/* The same for `file` bytes that were all safe. Records that are broken are left out, and after the
 * others DRAY_ECHECKSUM names the first of them. */
int dray__records_read_whole(int fd, const char *path, uint64_t salt, uint64_t file,
                             dray__journal_each each, void *user, dray_error *error);

/* Reads the file's head. *salt is 0 when the file has no head yet. */
int dray__head_read(int fd, const char *path, uint64_t *salt, dray_error *error);
/* Writes a head with a new salt. Does not sync. */
int dray__head_write(const dray__journal_files *files, int fd, const char *path, uint64_t *salt,
                     dray_error *error);

extern const dray__journal_files dray__journal_real_files;
/* Returns DRAY_EFULL when the disk is full, else DRAY_ESYS. */
int dray__file_failed(const char *path, int errnum, const char *what, dray_error *error);

/* Output to a file, through a block of memory that stays in the processor's cache. */
typedef struct dray__output {
    const dray__journal_files *files;
    const char *path; /* borrowed */
    int fd;
    uint64_t salt;
    uint64_t at;      /* of the block in the file */
    uint64_t started; /* writeback was started up to here */
    uint8_t *block;
    size_t used, summed;
    bool in_record;
    struct dray__sum *sum;
} dray__output;

int dray__output_init(dray__output *out, const dray__journal_files *files, dray_error *error);
void dray__output_free(dray__output *out);
/* Makes it write to this file, from offset `at` on. */
void dray__output_to(dray__output *out, int fd, const char *path, uint64_t salt, uint64_t at);
/* Returns the offset of the next byte. */
uint64_t dray__output_end(const dray__output *out);
/* Writes an entry. Sets entry->missing when its pieces do not exist any more. */
int dray__output_entry(dray__output *out, dray__journal_entry *entry, uint64_t safe,
                       const dray__journal_options *from, dray_error *error);
/* Copies a record of another file, and checks its sum. */
int dray__output_copy(dray__output *out, int from, const char *path, uint64_t salt, uint64_t at,
                      const dray__record *record, dray_error *error);
int dray__output_flush(dray__output *out, dray_error *error);
