/* How nodes hand tensors to each other through shared memory (src/tether/runtimes/process/memory.py), for the model
   checker Spin.

   A worker, which GaDei and this model call a learner, pushes gradients to a hub; the hub answers each with weights.
   Both have a region of blocks that the other can see. A tensor goes in two parts, as collectives send them: two loans
   of one block, each in a message of its own. Either process may be killed before any of its steps; the other is then
   told of the death.

   The checker tries every order of steps, and verifies:
   - No deadlock: every process that lives comes to its end (GaDei, theorem 2).
   - The hub uses every part of every gradient exactly once if both live (GaDei, theorem 3), and never twice.
   - No block changes while it is read.
   - No loan stays out for ever.

   A macro drops one rule, and the checker must then find what goes wrong:
   REUSE_LENT      a block is used again while it is lent
   RETURN_EARLY    a loan is returned before its block is read
   LEND_LATE       the byte of a loan is set after the message is sent
   KEEP_DEAD       loans to a dead peer are not taken back
   FORGET_LIVING   loans to a living peer are taken back
   NO_NEWS         a process is not told of the other's death
   WAIT_FOR_ROOM   a sender without a free block waits instead of sending the tensor in the message */

#define LEARNER 0
#define HUB 1
#define BLOCKS 2
#define LOANS 3
#define PARTS 2
#ifndef GRADIENTS
#define GRADIENTS 3
#endif
#ifndef AHEAD
#define AHEAD 2          /* how many gradients may be unanswered */
#endif
#define NONE 255
#define WRITING 254

/* shared: the contents of the blocks of each region, and the bytes of its loans */
byte content[2 * BLOCKS];
bool byte_set[2 * LOANS];

/* private to the owner of a region: the block of each loan, or NONE if the loan is free */
byte lent[2 * LOANS] = NONE;

/* the sockets: value, part, loan, block */
chan to_hub = [GRADIENTS * PARTS] of { byte, byte, byte, byte };
chan to_learner = [GRADIENTS * PARTS] of { byte, byte, byte, byte };

bool finished;              /* the learner has all its answers, and waits until the hub has ended */
bool dead[2], told[2], ended[2];
byte taken[GRADIENTS * PARTS];

/* take back the loans that have been returned */
inline sweep(me) {
    atomic {
        for (i : 0 .. LOANS - 1) {
            if
            :: !byte_set[me * LOANS + i] -> lent[me * LOANS + i] = NONE
            :: else
            fi
        }
        i = 0
    }
}

/* the last block that is not lent, or NONE */
inline choose_block(me) {
    atomic {
        block = NONE;
        for (i : 0 .. BLOCKS - 1) {
            free = true;
            for (j : 0 .. LOANS - 1) {
#ifdef REUSE_LENT
                free = true
#else
                free = free && lent[me * LOANS + j] != i
#endif
            }
            if
            :: free -> block = i
            :: else
            fi
        }
        i = 0; j = 0; free = false
    }
}

inline choose_loan(me) {
    atomic {
        loan = NONE;
        for (i : 0 .. LOANS - 1) {
            if
            :: lent[me * LOANS + i] == NONE -> loan = i
            :: else
            fi
        }
        i = 0
    }
}

inline send(me, channel, value) {
    sweep(me);
    choose_block(me);
#ifdef WAIT_FOR_ROOM
    do
    :: block != NONE -> break
    :: else -> (lent[me * LOANS] != NONE && !byte_set[me * LOANS] ||
                lent[me * LOANS + 1] != NONE && !byte_set[me * LOANS + 1] ||
                lent[me * LOANS + 2] != NONE && !byte_set[me * LOANS + 2]);
        sweep(me);
        choose_block(me)
    od;
#endif
    if
    :: block != NONE ->
        content[me * BLOCKS + block] = WRITING;
        content[me * BLOCKS + block] = value
    :: else
    fi;
    part = 0;
    do
    :: part < PARTS ->
        choose_loan(me);
        if
        :: block == NONE || loan == NONE -> channel ! value, part, NONE, NONE
        :: else ->
            lent[me * LOANS + loan] = block;
#ifndef LEND_LATE
            byte_set[me * LOANS + loan] = true;
#endif
            channel ! value, part, loan, block;
#ifdef LEND_LATE
            byte_set[me * LOANS + loan] = true
#endif
        fi;
        part++
    :: else -> break
    od;
    atomic { part = 0; loan = NONE; block = NONE }
}

/* read the tensor of a message, which takes more than one step; `give_back` returns the loan */
inline use(peer, value) {
    if
    :: loan == NONE
    :: else ->
#ifdef RETURN_EARLY
        byte_set[peer * LOANS + loan] = false;
#endif
        assert(content[peer * BLOCKS + block] == value);
        assert(content[peer * BLOCKS + block] == value)
    fi
}

inline give_back(peer) {
    if
    :: loan == NONE
    :: else -> byte_set[peer * LOANS + loan] = false
    fi;
    atomic { loan = NONE; block = NONE; part = 0 }
}

/* take back all loans to the peer */
inline forget(me) {
    atomic {
        for (i : 0 .. LOANS - 1) {
            byte_set[me * LOANS + i] = false;
            lent[me * LOANS + i] = NONE
        }
        i = 0
    }
}

active proctype learner() {
    byte i, j, loan = NONE, block = NONE, part, value, pushed, answered;
    bool free;
    {
        do
        :: pushed < GRADIENTS && pushed - answered < AHEAD ->
            send(LEARNER, to_hub, pushed);
            pushed++
        :: to_learner ? value, part, loan, block ->
            use(HUB, value);
            answered = answered + part;   /* the last part, number 1, completes an answer */
            give_back(HUB)
        :: answered == GRADIENTS -> break
        :: told[LEARNER] -> break
#ifdef FORGET_LIVING
        :: pushed > answered -> forget(LEARNER)
#endif
        od;
        finished = true;
        if
        :: told[LEARNER] ->
#ifdef KEEP_DEAD
            skip
#else
            forget(LEARNER)
#endif
        :: ended[HUB] && !dead[HUB]
        fi
    } unless { dead[LEARNER] };
    ended[LEARNER] = true
}

active proctype hub() {
    byte i, j, loan = NONE, block = NONE, part, value, held = NONE;
    bool free;
    {
        do
        :: to_hub ? value, part, loan, block ->
            use(LEARNER, value);
            taken[value * PARTS + part]++;
            assert(taken[value * PARTS + part] == 1);
            if
            :: part == PARTS - 1 ->
                held = loan;               /* the answer is sent before the last reference to the gradient is dropped */
                send(HUB, to_learner, value);
                loan = held;
                held = NONE
            :: else
            fi;
            give_back(LEARNER)
        :: finished -> break
        :: told[HUB] ->
#ifndef KEEP_DEAD
            forget(HUB);
#endif
            break
        od
    } unless { dead[HUB] };
    ended[HUB] = true
}

/* kill -9 at any step, and telling the other process */
active proctype killer() {
    if
    :: dead[LEARNER] = true
    :: dead[HUB] = true
    :: skip
    fi;
#ifndef NO_NEWS
    atomic {
        told[HUB] = dead[LEARNER];
        told[LEARNER] = dead[HUB]
    }
#endif
}

/* what must hold when both processes have ended */
active proctype judge() {
    byte i;
    ended[LEARNER] && ended[HUB];
    atomic {
        if
        :: !dead[LEARNER] && !dead[HUB] ->
            for (i : 0 .. GRADIENTS * PARTS - 1) {
                assert(taken[i] == 1)
            }
        :: else
        fi;
        for (i : 0 .. 2 * LOANS - 1) {
            assert(dead[i / LOANS] || !byte_set[i])
        }
    }
}
