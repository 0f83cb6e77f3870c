/* src/weights/registry/: the half of weights that runs in the coordinator. It knows who publishes
 * and who subscribes, which version is ready, who is reading it and who may, and it lets the ranks
 * of a group commit an update together or not at all. It holds no bytes of weights. requests.c
 * decodes requests and keeps the entries that they open; gang.c is about publishers, group.c and
 * update.c about subscribers. */

/* The registry: who holds which weights, which version is ready, who reads it, and the group commit
 * of updates. A state machine without sockets: it is handed frames (messages.h) and answers
 * tickets, now or later. registry.c puts it behind the coordinator. */
#pragma once

#include "weights/messages.h"

#include <dray/dray.h>
#include <jansson.h>

typedef struct dray__registry dray__registry;

/* Who asks. The name is copied where it is kept. */
typedef struct dray__party {
    uint64_t member, host;
    int64_t pid;
    const char *name;
} dray__party;

typedef struct dray__registry_ops {
    /* Ends a ticket: with an error, or with a reply (payload NULL: empty; fd -1: none, else the
     * registry's to close). */
    void (*answer)(void *user, void *ticket, const dray_error *error, dray__writer *payload,
                   int fd);
    /* Asks for dray__registry_expired at the deadline. */
    void (*expire_at)(void *user, void *ticket, int64_t deadline_ns);
    void *user;
    /* Posts what the ticket's member reports of an update: JSON. NULL: nobody watches. */
    void (*report)(void *user, void *ticket, const char *json);
} dray__registry_ops;

int dray__registry_new(const dray__registry_ops *ops, dray__registry **out, dray_error *error);
/* The how-manyth registry of the same members this is, from 1: ids, attempts and incarnations are
 * none of those before. */
void dray__registry_begin(dray__registry *registry, uint64_t generation);
void dray__registry_free(dray__registry *registry);

/* One request. fd: its descriptor or -1; the registry's from here. The ticket is answered exactly
 * once, in this call or a later one. */
void dray__registry_handle(dray__registry *registry, const dray__party *party, uint16_t type,
                           dray__reader *payload, int fd, void *ticket);
/* A kept ticket's deadline passed, or nobody is there to hear the answer; it is answered. */
void dray__registry_expired(dray__registry *registry, void *ticket, int gone);
/* All that the member had opened ends. */
void dray__registry_member_ended(dray__registry *registry, uint64_t member);
/* Adds "publishers", "versions", "groups", "subscribers". */
void dray__registry_status(dray__registry *registry, json_t *object);

/* registry.c: adds a registry to a coordinator, as the service of its messages. */
struct dray__coordinator;
int dray__registry_add(struct dray__coordinator *coordinator, dray_error *error);
