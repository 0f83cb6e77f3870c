/* src/weights/registry/: the half of weights that runs in the coordinator. It knows the publishers
 * and the subscribers, the version that is ready, and the groups that read it. It lets the ranks of
 * a group commit an update together or not at all. It holds no bytes of weights. requests.c decodes
 * requests and keeps the entries that they open; trainer.c is about publishers, group.c and
 * update.c about subscribers. */

/* The registry is a state machine without sockets. The coordinator calls it with requests
 * (messages.h), each with a ticket, and the registry answers the ticket at once or later.
 * registry.c connects the two. */
#pragma once

#include "weights/messages.h"

#include <dray/dray.h>
#include <jansson.h>

typedef struct dray__registry dray__registry;

/* The member that sent a request. The registry copies the name. */
typedef struct dray__party {
    uint64_t member, host;
    int64_t pid;
    const char *name;
} dray__party;

typedef struct dray__registry_ops {
    /* Answers a ticket with an error, or with a reply. payload NULL: the reply is empty. fd: a
     * descriptor to send, which the registry closes; -1: none. */
    void (*answer)(void *user, void *ticket, const dray_error *error, dray__writer *payload,
                   int fd);
    /* Asks for dray__registry_expired at the deadline. */
    void (*expire_at)(void *user, void *ticket, int64_t deadline_ns);
    void *user;
    /* Posts a report of the ticket's member about an update, as JSON. NULL when reports are
     * dropped. */
    void (*report)(void *user, void *ticket, const char *json);
} dray__registry_ops;

int dray__registry_new(const dray__registry_ops *ops, dray__registry **out, dray_error *error);
/* Sets the number of this registry among those that have served the same members, from 1. Its ids,
 * attempts and incarnations differ from those of earlier registries. */
void dray__registry_begin(dray__registry *registry, uint64_t generation);
void dray__registry_free(dray__registry *registry);

/* Handles a request. fd: its descriptor, which is taken over; -1: none. The ticket is answered
 * exactly once, in this call or a later one. */
void dray__registry_handle(dray__registry *registry, const dray__party *party, uint16_t type,
                           dray__reader *payload, int fd, void *ticket);
/* Answers a kept ticket whose deadline has passed, or (gone) whose member is not connected. */
void dray__registry_expired(dray__registry *registry, void *ticket, int gone);
/* Ends everything that the member had opened. */
void dray__registry_member_ended(dray__registry *registry, uint64_t member);
/* Adds "publishers", "versions", "groups" and "subscribers" to a status. */
void dray__registry_status(dray__registry *registry, json_t *object);

/* registry.c: adds a registry to a coordinator, as the service of its messages. */
struct dray__coordinator;
int dray__registry_add(struct dray__coordinator *coordinator, dray_error *error);
