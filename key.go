package edgelimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/dchest/siphash"

	"github.com/caddyserver/caddy/v2"
)

// keyClient is the word that stands for the resolved client in a key.
const keyClient = "client"

// maxKeyParts bounds the work that one key costs.
const maxKeyParts = 16

// keyTemplate makes the key of a request: what tells one budget of a limit from
// another.
type keyTemplate struct {
	parts    []keyPart
	ipv4Bits int
	ipv6Bits int
	secret   atomic.Pointer[keySecret]
}

// keyPart is the word client, or text and placeholders.
type keyPart struct {
	raw    string
	client bool
	pieces []piece
}

// literal says whether the part is text alone.
func (p *keyPart) literal() bool {
	return !p.client && len(p.pieces) == 1 && !p.pieces[0].placeholder
}

// piece is literal text, or the name of a placeholder.
type piece struct {
	text        string
	placeholder bool
}

// parseKey reads the parts of a key. Default: the client alone.
func parseKey(parts []string) ([]keyPart, error) {
	if len(parts) == 0 {
		parts = []string{keyClient}
	}
	if len(parts) > maxKeyParts {
		return nil, fmt.Errorf("a key of %d parts: at most %d are possible", len(parts), maxKeyParts)
	}
	var key []keyPart
	for _, raw := range parts {
		if raw == keyClient {
			key = append(key, keyPart{raw: raw, client: true})
			continue
		}
		pieces, err := parsePieces("key", raw)
		if err != nil {
			return nil, err
		}
		for _, p := range pieces {
			if p.placeholder && isClientPlaceholder(p.text) {
				return nil, fmt.Errorf("key {%s}: write key client, which is the same address in one form and cut to its prefix", p.text)
			}
		}
		key = append(key, keyPart{raw: raw, pieces: pieces})
	}
	return key, nil
}

// parsePieces cuts a part into text and placeholders, as Caddy's replacer would.
func parsePieces(word, raw string) ([]piece, error) {
	if raw == "" {
		return nil, fmt.Errorf("a part of a key is empty: name a placeholder, text or the word client")
	}
	var pieces []piece
	for rest := raw; rest != ""; {
		open := strings.IndexByte(rest, '{')
		if open < 0 {
			return append(pieces, piece{text: rest}), nil
		}
		length := strings.IndexByte(rest[open:], '}')
		if length < 0 {
			return nil, fmt.Errorf("%s %q: a placeholder is not closed", word, raw)
		}
		name := rest[open+1 : open+length]
		if !strings.Contains(name, ".") || strings.ContainsAny(name, " {") {
			return nil, fmt.Errorf("%s %q: {%s} is no placeholder that Caddy knows", word, raw, name)
		}
		if open > 0 {
			pieces = append(pieces, piece{text: rest[:open]})
		}
		pieces = append(pieces, piece{text: name, placeholder: true})
		rest = rest[open+length+1:]
	}
	return pieces, nil
}

// rawParts are the parts as they were written, the default among them.
func rawParts(parts []keyPart) []string {
	var raw []string
	for _, part := range parts {
		raw = append(raw, part.raw)
	}
	return raw
}

// isClientPlaceholder says whether a placeholder is the client under another
// name, with no prefix cut and no state for the unresolved.
func isClientPlaceholder(name string) bool {
	return slices.Contains([]string{
		"http.vars.client_ip", "http.request.client_ip",
		"http.edge_limit.client_ip", "http.edge_limit.client",
	}, name)
}

// byClientAlone says whether the key is the client and nothing else.
func byClientAlone(parts []keyPart) bool {
	return len(parts) == 1 && parts[0].client
}

// Tags keep the kinds of key material apart, so that no text can be mistaken for
// an address, nor an empty value for a written one.
const (
	tagIPv4 byte = iota + 1
	tagIPv6
	tagUnresolved
	tagValue
	tagEmpty
)

// maxKeyField is what a part is hashed from at most: its tag and 16 bytes.
const maxKeyField = 1 + 16

// hash computes the key of a request. A part that is empty at run time counts
// under one key of its own, named in empty.
//
// It is hashed from a tag for each part and a field whose length follows from
// the tag, so that moving text from one part to the next changes the key.
func (t *keyTemplate) hash(res *resolution, repl *caddy.Replacer) (key uint64, empty string) {
	if len(t.parts) == 1 {
		var space [maxKeyField]byte // most keys: clearing room for all parts would cost as much as hashing
		return t.hashParts(space[:0], res, repl)
	}
	var space [maxKeyParts * maxKeyField]byte
	return t.hashParts(space[:0], res, repl)
}

func (t *keyTemplate) hashParts(space []byte, res *resolution, repl *caddy.Replacer) (key uint64, empty string) {
	secret := t.secret.Load()
	if len(t.parts) == 1 && !t.parts[0].client { // nothing beside it to be kept apart from
		value, missing := t.parts[0].evaluate(repl)
		if missing == "" {
			return secret.hashText(value) &^ 1, ""
		}
		return secret.hash(append(space, tagEmpty)) &^ 1, missing
	}
	material, empty := t.appendMaterial(space, res, repl)
	return secret.hash(material) &^ 1, empty // odd ones are bans
}

// appendMaterial appends what the key of a request is hashed from.
func (t *keyTemplate) appendMaterial(material []byte, res *resolution, repl *caddy.Replacer) (appended []byte, empty string) {
	for i := range t.parts {
		part := &t.parts[i]
		if part.client {
			material = t.appendClient(material, res)
			continue
		}
		value, missing := part.evaluate(repl)
		if missing != "" {
			empty = missing
			material = append(material, tagEmpty)
			continue
		}
		material = t.secret.Load().appendDigest(append(material, tagValue), value)
	}
	return material, empty
}

// evaluate expands the part. missing names a placeholder without a value.
func (p *keyPart) evaluate(repl *caddy.Replacer) (value, missing string) {
	for _, piece := range p.pieces {
		text := piece.text
		if piece.placeholder {
			got, _ := repl.Get(piece.text)
			if text = caddy.ToString(got); text == "" {
				return "", piece.text
			}
		}
		if len(p.pieces) == 1 {
			return text, ""
		}
		value += text
	}
	return value, ""
}

// appendClient appends the client cut to its prefix.
func (t *keyTemplate) appendClient(material []byte, res *resolution) []byte {
	if !res.resolved() {
		return append(material, tagUnresolved)
	}
	addr := res.client
	if !addr.Is4() || t.ipv4Bits < 32 { // else there is nothing to cut
		addr = clientPrefix(addr, t.ipv4Bits, t.ipv6Bits).Addr()
	}
	if addr.Is4() {
		field := addr.As4()
		return append(append(material, tagIPv4), field[:]...)
	}
	field := addr.As16()
	return append(append(material, tagIPv6), field[:]...)
}

// nat64 is the well-known prefix of RFC 6052. All IPv4 clients of one translator
// would share a single /64, so they count by their IPv4 address.
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// clientPrefix cuts a client to the range that counts as one.
func clientPrefix(client netip.Addr, ipv4Bits, ipv6Bits int) netip.Prefix {
	if nat64.Contains(client) {
		b := client.As16()
		client = netip.AddrFrom4([4]byte(b[12:]))
	}
	bits := ipv6Bits
	if client.Is4() {
		bits = ipv4Bits
	}
	prefix, _ := client.Prefix(bits) // bits were checked at load
	return prefix
}

// keySecret hashes keys so that nobody who does not know it can aim at a place
// in a table or make two keys collide. SipHash (Aumasson and Bernstein, 2012) is
// made for that.
type keySecret struct{ k0, k1, k2, k3 uint64 }

// newKeySecret derives a limit's secret from the pepper, so that one client's
// keys in two limits cannot be told to be the same client's.
func newKeySecret(pepper []byte, limit string) *keySecret {
	mac := hmac.New(sha256.New, pepper)
	mac.Write([]byte("edge_limit key " + limit))
	sum := mac.Sum(nil)
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(sum[8*i:]) }
	return &keySecret{word(0), word(1), word(2), word(3)}
}

func (s *keySecret) hash(material []byte) uint64 {
	return siphash.Hash(s.k0, s.k1, material)
}

// hashText is the key of a text alone.
func (s *keySecret) hashText(text string) uint64 {
	return siphash.Hash(s.k2, s.k3, bytesOf(text))
}

// appendDigest stands for a text of any length in 128 bits.
func (s *keySecret) appendDigest(material []byte, text string) []byte {
	lo, hi := siphash.Hash128(s.k2, s.k3, bytesOf(text))
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(material, lo), hi)
}

// bytesOf are a text's bytes, only to be read: long texts need no copy.
func bytesOf(text string) []byte {
	return unsafe.Slice(unsafe.StringData(text), len(text))
}
