// See rendezvous/store.h.
#pragma once

#include <gloo/rendezvous/store.h>
