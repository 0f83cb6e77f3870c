#include "control/protocol.h"

#include <stddef.h>

typedef struct message_row {
    uint16_t type, senders;
    const char *name;
} message_row;

static const message_row *find(uint16_t type)
{
    static const message_row messages[] = {
#define XX(name, value, who) {value, DRAY__MAY_##who, #name},
        DRAY__MESSAGE_MAP(XX)
#undef XX
    };
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++)
        if (messages[i].type == type)
            return &messages[i];
    return NULL;
}

const char *dray__message_name(uint16_t type)
{
    const message_row *found = find(type);
    return found ? found->name : "?";
}

uint32_t dray__message_senders(uint16_t type)
{
    const message_row *found = find(type);
    return found ? found->senders : DRAY__MAY_ANY;
}
