// Package node says which machine this is and since when it runs: a node id made
// once per machine, the kernel's boot id, and the clock that goes on while the
// machine sleeps. It is no discovery of other nodes and no proof towards them.
//
// The node id lies in /var/lib/maru/node-id together with the machine's DMI UUID.
// A file that was copied to another machine (a cloned image) shows the UUID of the
// first and is refused: two machines with one id would take each other's reboot
// as proof that a mapper is gone (docs/PROTOCOL.md, "Proof that a mapper is gone").
//
// Two processes that start at once make one id: the file is written aside, synced
// and linked to its name, and the loser reads what the winner wrote. There are no
// goroutines and no locks.
package node
