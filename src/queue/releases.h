/* Releases that nobody waits for need no message: the client writes the ticket onto a page of
 * memory that it shares with the controller. The controller reads the pages of a queue's clients
 * before it looks at any request of the queue's, and a client's before that client ends: so
 * everybody sees what they would see if a message had come at once, but nobody is woken for it.
 * While nobody asks, it reads them now and then, so that memory goes.
 * While somebody waits for what releases free, the pages say so, and clients send messages.
 *
 * A page has one writer, and neither side trusts it further than its own releases. */
#ifndef DRAY_QUEUE_RELEASES_H
#define DRAY_QUEUE_RELEASES_H

#include <stdbool.h>
#include <stdint.h>

#define DRAY__RELEASES 64u /* tickets on a page; where it is full, a message has it read */

/* What is waited for: */
#define DRAY__WANT_BYTES 1u /* bytes that are pinned */
#define DRAY__WANT_ROWS 2u  /* rows that are claimed */

typedef struct dray__releases {
    uint32_t written; /* tickets so far, by the client */
    uint32_t tickets[DRAY__RELEASES];
    _Alignas(64) uint32_t read; /* of them by the controller, which alone writes from here on */
    uint32_t wanted;
} dray__releases;

/* The client's page, and its descriptor for the controller, which is the caller's to close. NULL:
 * the system gives none, and messages do as well. */
dray__releases *dray__releases_new(int *fd);
/* The controller's view of it; the descriptor stays the caller's. NULL: it is no such page. */
dray__releases *dray__releases_map(int fd);
void dray__releases_free(dray__releases *page); /* NULL is fine */

/* Writes a ticket. false: send a message instead, or (which does no harm) as well, as there is no
 * page (NULL), or no room, or what the release frees (`frees`: of the above) is waited for. */
bool dray__releases_write(dray__releases *page, uint32_t ticket, uint32_t frees);
/* What was written after the first *read tickets, which then are as many more. */
uint32_t dray__releases_read(dray__releases *page, uint32_t *read, uint32_t out[DRAY__RELEASES]);
/* Says what is waited for. What is written later is told by a message; read the page after it. */
void dray__releases_want(dray__releases *page, uint32_t wanted);

#endif
