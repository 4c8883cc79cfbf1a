// Package chain reads the chain of addresses that proxies leave in a request's
// headers: a comma separated list in the manner of X-Forwarded-For, or the
// elements of Forwarded (RFC 7239). It knows the syntax and nothing else: which
// header is read, who is trusted and where a walk stops is its caller's affair.
//
// # From the right
//
// Each proxy appends what it saw to what it was sent. The left end of a chain is
// therefore whatever the caller cared to write, and the right end is what the
// nearest proxy wrote. A [Reader] yields the right end first and has not looked
// at anything further left when it does, so nothing that stands there can change
// what it yields: not an odd spelling, not a quote left open, not ten thousand
// entries.
//
// # Empty entries count
//
// The place of an entry says who wrote it. An entry that is skipped moves all
// entries left of it one place to the right, and hands a place that belongs to a
// proxy to somebody else. So an empty entry is an entry, as is one that is no
// address; what to make of it is decided where it is read.
//
// # Constant memory
//
// Nothing is split, copied or collected: a Reader is a small value holding the
// part of the chain not yet read, each entry is a substring of its line, and
// neither reading nor parsing allocates, however long the header is. (One
// exception: text made of nothing but the characters of an IPv6 address that is
// none all the same, such as 1::2::3, costs the one error that netip returns.)
// Time grows with the bytes read, not with their arrangement.
package chain

import "strings"

// Reader yields the entries of a chain from the right.
//
// The zero value is an empty chain. A copy reads on by itself from the place
// where it was made. A Reader must not be used by several goroutines at once,
// and the lines that it was made from must not change while it is in use.
type Reader struct {
	lines     []string // the lines not yet begun
	line      string   // the part of the current line not yet read
	open      bool     // whether line holds an entry: an empty line may hold one
	forwarded bool     // whether commas inside quoted strings separate nothing
}

// FromList returns a reader of a comma separated list. The lines are those of
// one header, in wire order; together they are one list.
func FromList(lines []string) Reader {
	return Reader{lines: lines}
}

// FromForwarded returns a reader of the elements of RFC 7239, in which a comma
// inside a quoted string separates nothing. The lines are those of one header,
// in wire order; together they are one list, but no quoted string reaches from
// one line into another.
//
// An element that its writer quoted properly comes out unchanged whatever stands
// left of its comma. A quote for which no partner stands further left on its line
// makes one element of all that is left of it, which [ForwardedFor] refuses. No
// reader can help where a proxy copies the caller's text into its own element
// without escaping quotes: then the caller is the writer of that element.
func FromForwarded(lines []string) Reader {
	return Reader{lines: lines, forwarded: true}
}

// Next returns the next entry from the right, and false after the leftmost. The
// entry is the raw text between two commas, with its white space; it may be
// empty. An empty line is one empty entry, "a," is the entries "a" and "".
func (r *Reader) Next() (entry string, ok bool) {
	if !r.open {
		last := len(r.lines) - 1
		if last < 0 {
			return "", false
		}
		r.line, r.lines, r.open = r.lines[last], r.lines[:last], true
	}
	comma := r.lastComma()
	entry = r.line[comma+1:]
	if comma < 0 {
		r.line, r.open = "", false
	} else {
		r.line = r.line[:comma]
	}
	return entry, true
}

func (r *Reader) lastComma() int {
	if r.forwarded {
		return lastUnquotedComma(r.line)
	}
	return strings.LastIndexByte(r.line, ',')
}
